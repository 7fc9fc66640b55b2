"""Angles of rotary embeddings in one kernel: the op, and the modules that it stands in for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kbit.integrations.transformers import angles
from tiny_models import build

op = torch.ops.kbit.rotary_angles
gpu = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(-(2**40), 2**40), min_size=3, max_size=3), max_size=3),
    st.integers(0, 5),
    st.floats(-3, 3, width=32),
    st.sampled_from([torch.float32, *HALVES]),
)
def test_the_definition(positions, half, factor, dtype):
    positions, frequencies = torch.tensor(positions, dtype=torch.int64).view(-1, 3), torch.rand(half)
    cos, sin = op(frequencies, positions, factor, dtype)
    each = positions[..., None].float() * frequencies
    for have, of in ((cos, torch.cos), (sin, torch.sin)):
        assert have.dtype == dtype
        assert torch.equal(have, torch.cat((of(each), of(each)), -1).mul(factor).to(dtype))


ARGUMENTS = {
    "frequencies": torch.rand(8),
    "positions": torch.tensor([[0, 5, 9]]),
    "factor": 1.5,
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"frequencies": ARGUMENTS["frequencies"].half()},
            "frequencies must be torch.float32, got torch.float16",
        ),
        ({"frequencies": torch.rand(1, 8)}, r"frequencies must be \[R / 2\], got \(1, 8\)"),
        ({"positions": ARGUMENTS["positions"].int()}, "positions must be torch.int64, got torch.int32"),
        ({"positions": torch.tensor([1])}, r"positions must be \[B, T\], got \(1,\)"),
        ({"positions": ARGUMENTS["positions"].to("meta")}, "frequencies are on cpu, positions on meta"),
        ({"dtype": torch.int32}, "dtype must be float32, float16 or bfloat16, got torch.int32"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        op(*(ARGUMENTS | change).values())


def test_opcheck():
    torch.library.opcheck(op.default, tuple(ARGUMENTS.values()))


# -- modules of models ---------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Of the op, by modules on a CPU, too."""
    made = []
    monkeypatch.setattr(angles, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.ops.kbit, "rotary_angles", lambda *given: made.append(given) or op(*given))
    return made


def of_type(kind, **more):
    rope = {"rope_type": kind, "rope_theta": 1e4, **more}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
    return LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))


def run(layer, *given, **named):
    with torch.no_grad(), angles.fused_angles(torch.nn.ModuleList([layer])):
        return layer(*given, **named)


FIXED = [
    ("default", {}),
    ("linear", {"factor": 2.0}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
]


@pytest.mark.parametrize(("kind", "more"), FIXED, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_kinds_with_fixed_frequencies(kind, more, dtype, calls):
    layer, x = of_type(kind, **more), torch.zeros(2, 3, 4, dtype=dtype)
    for positions in (torch.tensor([[0, 1, 5000]]), torch.tensor([[3, 4, 5], [0, 0, 70001]])):
        want = layer(x, positions)
        calls.clear()
        for named in ({}, {"position_ids": positions}):
            have = run(layer, x, *(() if named else (positions,)), **named)
            assert all(map(torch.equal, have, want))
    assert len(calls) == 2


def test_what_is_left_to_the_module(calls):
    changing = of_type("dynamic", factor=2.0, original_max_position_embeddings=32)
    layer, x, positions = of_type("default"), torch.zeros(2, 3, 4).half(), torch.tensor([[0, 1, 5]])
    for one, input in ((changing, x), (layer, x.float())):
        assert all(map(torch.equal, run(one, input, positions), one(input, positions)))
    with angles.fused_angles(torch.nn.ModuleList([layer])):  # with gradients
        layer(x, positions)
        with torch.no_grad():
            layer(x, positions.int())
    assert not calls


class Foreign(LlamaRotaryEmbedding):
    def forward(self, timestamps, length=None):
        return timestamps, length


def test_classes_that_are_called_otherwise(calls):
    layer, x = Foreign(of_type("default").config), torch.zeros(1, 3, 4).half()
    assert run(layer, x) == (x, None)
    assert run(layer, timestamps=x, length=5) == (x, 5)
    assert run(layer, x, length=5) == (x, 5)
    assert not calls


class Doubled(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return tuple(2 * each for each in super().forward(x, position_ids))


class Refusing(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        if position_ids.max() > 9:
            raise ValueError("too far")
        return super().forward(x, position_ids)


@pytest.mark.parametrize("kind", [Doubled, Refusing])
def test_a_class_that_computes_something_else(kind, calls, caplog):
    caplog.set_level("DEBUG", logger="kbit")
    layer = kind(of_type("default").config)
    x, positions = torch.zeros(1, 3, 4).half(), torch.tensor([[0, 1, 5]])
    assert all(map(torch.equal, run(layer, x, positions), layer(x, positions)))
    assert [*map(bool, angles._known[layer].values())] == [False]
    assert ("Refusing could not be tried" in caplog.text) == ("too far" in caplog.text) == (kind is Refusing)


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "mixtral", "qwen3_5_moe"]
)
def test_models_give_the_same_logits(architecture, calls):
    model, ids = build(architecture, torch.bfloat16), torch.tensor([[3, 5, 7]])
    with torch.no_grad():
        want = model(ids).logits
        with angles.fused_angles(model):
            model(ids)
            calls.clear()
            assert torch.equal(model(ids).logits, want)
    assert len(calls) == 1


def test_positions_by_axes(calls):
    """Those of text are one for all axes; of images they differ, and are left to the class."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextConfig, Qwen3_5TextRotaryEmbedding

    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.5,
    }
    layer = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=32, rope_parameters=rope))
    x, text = torch.zeros(2, 3, 4).bfloat16(), torch.tensor([[0, 1, 5], [3, 4, 70001]])
    axes = torch.stack((text, text + 1, text + 2))
    for positions, taken in ((text.expand(3, -1, -1), 1), (axes, 0), (axes[:1].expand(3, -1, -1), 1)):
        want = layer(x, positions)
        run(layer, x, positions)  # tried by now
        calls.clear()
        assert all(map(torch.equal, run(layer, x, positions), want))
        assert len(calls) == taken


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_the_kernel_gives_what_pytorch_gives(dtype):
    frequencies = (1e6 ** -(torch.arange(64) / 64)).cuda()
    for shape, most in (((1, 1), 9), ((32, 1), 2**15), ((2, 2048), 2**18), ((1, 300), 2**40)):
        positions = torch.randint(most, shape, device="cuda")
        for factor in (1.0, 1.2079):
            each = positions[..., None].float() * frequencies
            for have, of in zip(
                op(frequencies, positions, factor, dtype), (torch.cos, torch.sin), strict=True
            ):
                assert torch.equal(have, torch.cat((of(each), of(each)), -1).mul(factor).to(dtype))


@gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite"])
def test_steps_of_a_model_use_it(architecture, monkeypatch):
    model, ids = build(architecture, torch.bfloat16).cuda(), torch.tensor([[3, 5, 7]], device="cuda")
    made = []
    with torch.no_grad():
        want = model(ids).logits
        with angles.fused_angles(model):
            model(ids)
            monkeypatch.setattr(
                torch.ops.kbit, "rotary_angles", lambda *given: made.append(given) or op(*given)
            )
            assert torch.equal(model(ids).logits, want)
    assert len(made) == 1
