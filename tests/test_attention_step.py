"""`kbit::attention_step`: the op against attention in float64, transformers' layers by it, its kernel."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import AutoModelForCausalLM

from attention_steps import HOW, ROOM, operands, require
from kbit.backends.cuda import attention as kernels
from kbit.backends.cuda.attention import Config
from kbit.backends.cuda.driver import DeviceLimits
from kbit.integrations.transformers import attention_heads
from kbit.integrations.transformers.attention_heads import Form
from kbit.integrations.transformers.step_kernels import step_kernels
from kbit.nn.norm import fuse_norms
from static_steps import heads_alone, steps, take_caches_of_a_cpu
from tiny_models import ARCHITECTURES, build

ops = torch.ops.kbit
gpu = pytest.mark.gpu


def step(tensors, how=HOW):
    """The op's result, with caches of its own, and these."""
    tensors = tensors | {name: tensors[name].clone() for name in ("keys", "values")}
    return ops.attention_step(*tensors.values(), *how), tensors["keys"], tensors["values"]


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (9, 1), (3, 3)]),
    st.sampled_from([(8, 4), (34, 2), (64, 64)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, ROOM + 3),
    *[st.booleans()] * 3,
    st.sampled_from([HOW, (0.3, 1e-5, True, False)]),
)
def test_it_is_attention(batch, heads, sizes, dtype, length, mask, gate, norms, how):
    torch.manual_seed(batch * 100 + length)
    options = {"length": length, "mask": mask, "gate": gate, "norms": norms}
    tensors = operands(batch, heads, *sizes, dtype, **options)
    require(*step(tensors, how), tensors, how)


def test_nothing_but_masked_tokens_gives_zero():
    tensors = operands(1, (2, 1), 8, 4)
    tensors["mask"] = torch.full((1, ROOM), -math.inf)
    assert not step(tensors)[0].any()


GIVEN = operands(2, (4, 2), 8, 4, gate=True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": GIVEN["query"].long()}, TypeError, "query"),
        ({"query": GIVEN["query"][0]}, ValueError, "3, 4 and 2 dimensions"),
        ({"query": GIVEN["query"][:, :3]}, ValueError, "divide the 3 of query, got 2"),
        ({"key": GIVEN["key"][:, :1]}, ValueError, r"key must be \[2, 2, 8\]"),
        ({"value": GIVEN["value"].half()}, TypeError, "value must be torch.float32"),
        ({"gate": GIVEN["gate"][:, :, :4]}, ValueError, r"gate must be \[2, 4, 8\]"),
        ({"key_norm": None}, ValueError, "given both, or neither"),
        ({"query_norm": GIVEN["key_norm"][:4]}, ValueError, r"query_norm must be \[8\]"),
        ({"cos": GIVEN["cos"][:, :3]}, ValueError, "even number of columns, up to the 8"),
        ({"cos": torch.zeros(1, 10), "sin": torch.zeros(1, 10)}, ValueError, "up to the 8 of a head, got 10"),
        ({"sin": GIVEN["sin"].to("meta")}, ValueError, "sin is on meta"),
        ({"mask": GIVEN["mask"].bool()}, TypeError, "mask must be torch.float32"),
        ({"mask": GIVEN["mask"][:, :5]}, ValueError, r"mask must be \[2, 70\]"),
        ({"values": GIVEN["values"][:, :, :5]}, ValueError, r"values must be \[2, 2, 70, 8\]"),
        ({"keys": GIVEN["keys"].mT.contiguous().mT}, ValueError, "must be contiguous"),
        ({"length": torch.zeros(2).long()}, TypeError, "length must be one int64"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.attention_step(*(GIVEN | change).values(), *HOW)


def test_eps_must_be_a_number():
    with pytest.raises(ValueError, match="eps must be a number of 0 or more"):
        ops.attention_step(*GIVEN.values(), 0.1, -1.0)


def test_opcheck():
    tensors = operands(2, (4, 2), 8, 4, length=ROOM)  # no NaN, which opcheck takes for unequal
    torch.library.opcheck(ops.attention_step.default, (*tensors.values(), *HOW))


H200, A100 = DeviceLimits(132, 232448, "90a"), DeviceLimits(108, 166912, "80")
RTX = DeviceLimits(170, 101376, "120a")


def config(device, columns):
    return kernels.config_for(columns, device.arch, device.shared_bytes)


@pytest.mark.parametrize(
    ("sizes", "columns", "most", "plan"),
    [
        ((1, 32, 8, 128), 128, 16, (1, 2)),
        ((1, 32, 8, 4096), 128, 16, (1, 8)),
        ((1, 32, 4, 4096), 128, 16, (1, 16)),
        ((1, 32, 4, 4096), 128, 8, (1, 8)),
        ((8, 32, 4, 4096), 128, 16, (1, 4)),  # 32 clusters of 8 do not run at once
        ((4, 32, 8, 16384), 128, 16, (1, 2)),  # nor would those of 4, evenly
        ((32, 32, 4, 16384), 128, 16, (1, 2)),
        ((32, 32, 8, 4096), 128, 16, (1, 1)),
        ((1, 12, 1, 1), 256, 16, (2, 2)),
    ],
)
def test_plans(sizes, columns, most, plan):
    given = dict(zip(("batch", "heads", "key_heads", "room"), sizes, strict=True))
    assert kernels.plan(**given, config=config(H200, columns), device=H200, most=most) == plan


def test_gpus_that_have_a_kernel():
    assert config(H200, 128) == Config(128, 8, 1, blocks=2)
    assert config(RTX, 128) == Config(128, 8, 1, blocks=1)
    assert config(A100, 128) is config(H200, 96) is None
    assert not kernels.takes(torch.device("cpu"), 128, 128)


def test_columns_that_the_kernel_can_turn(monkeypatch):
    monkeypatch.setattr(kernels.driver, "device_limits", lambda index: H200)
    gpu = torch.device("cuda", 0)
    assert kernels.takes(gpu, 128, 64)
    assert not kernels.takes(gpu, 128, 24)
    assert not kernels.takes(gpu, 96, 32)


# -- layers of transformers ----------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Calls of the op, which takes tensors of a CPU here, with caches as on a GPU."""
    made, own = [], ops.attention_step
    take_caches_of_a_cpu(monkeypatch)
    monkeypatch.setattr(attention_heads, "takes", lambda device, columns, turned: True)
    monkeypatch.setattr(ops, "attention_step", lambda *given: made.append(given) or own(*given))
    return made


@pytest.mark.parametrize(
    ("name", "layers", "gated"),
    [
        ("llama", 2, False),
        ("qwen3", 2, False),
        ("qwen3_moe", 2, False),
        ("qwen3_next", 1, True),
        ("qwen3_5_moe", 1, True),
        ("mixtral", 2, False),
    ],
)
def test_layers_of_transformers_compute_the_same(name, layers, gated, calls):
    model = build(name, torch.float32, spread=False).eval().bfloat16()
    fuse_norms(model)
    own = steps(model, heads_alone)
    assert not calls
    steps(model, step_kernels)  # tries what the class does
    calls.clear()
    made = steps(model, step_kernels)
    assert len(calls) == 3 * layers
    assert {given[3] is not None for given in calls} == {gated}
    assert torch.equal(made[0], own[0])
    assert made[1] == own[1] == 8


@pytest.mark.parametrize("how", ["", "prompt", "no mask", "float mask", "rows", "columns", "more", "device"])
def test_what_the_op_does_not_take(how, monkeypatch):
    monkeypatch.setattr(attention_heads, "takes", lambda device, columns, turned: how != "device")

    class Layer:
        head_dim = 16

    class Cached:
        keys = values = torch.zeros(2, 1, 8, 16).half()

    x, mask = torch.zeros(2, 2 if how == "prompt" else 1, 48).half(), torch.zeros(2, 1, 1, 8).half()
    masks = {"no mask": None, "float mask": mask.float(), "rows": mask[:, :, :0], "columns": mask[..., :7]}
    named = {"attention_mask": masks.get(how, mask), "output_attentions": how == "more"}
    named["position_embeddings"] = (torch.zeros(1, 1, 16).half(),) * 2
    assert attention_heads._is_a_step(Layer, x, Cached, named) is (how == "")


def test_a_class_of_which_only_the_rest_fits(calls, monkeypatch):
    """The op is not taken where it gives something else than the class's own forward."""
    own = attention_heads._is
    monkeypatch.setattr(attention_heads, "_is", lambda *given: not given[-1].one_op and own(*given))
    model = build("llama", torch.float32, spread=False).eval().bfloat16()
    want = steps(model, heads_alone)
    have = steps(model, step_kernels)
    assert not calls
    assert torch.equal(have[0], want[0])
    forms = attention_heads._forms[model.model.layers[0].self_attn]
    assert [*forms.values()] == [Form(gated=False, one_op=False)]


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [HOW, (0.3, 1e-5, True, False)])
@pytest.mark.parametrize(
    ("batch", "heads", "columns", "room", "lengths"),
    [
        (1, (32, 8), (128, 128), 300, (0, 15, 127, 299, 300)),
        (3, (32, 4), (128, 128), 1000, (600, 999, 2**40)),
        (2, (16, 2), (256, 64), 3000, (1, 1023, 2999)),
        (2, (16, 16), (64, 64), 500, (499,)),
        (2, (17, 1), (128, 64), 64, (40,)),
        (40, (8, 4), (128, 128), 2000, (1999,)),  # one block has a head of keys
        (2, (4, 2), (24, 16), 50, (20,)),  # no kernel
    ],
)
def test_the_kernel(batch, heads, columns, room, lengths, how, dtype):
    for length in lengths:
        for more in (True, False):
            options = {"length": length, "room": room, "mask": more, "gate": more, "norms": more}
            tensors = operands(batch, heads, *columns, dtype, "cuda", **options)
            require(*step(tensors, how), tensors, how)


@gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 4, 128), (16, 2, 256), (16, 16, 64), (40, 5, 96)])
def test_repeated_runs_are_equal_also_on_a_busy_gpu(heads):
    *of, columns = heads
    tensors = operands(4, of, columns, columns, torch.bfloat16, "cuda", 700, 800, gate=True)
    want, other, busy = step(tensors), torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for turn in range(300):
        if turn % 2:
            with torch.cuda.stream(other):
                busy @ busy
        for one, expected in zip(step(tensors), want, strict=True):
            assert torch.equal(one.view(torch.int16), expected.view(torch.int16))


@gpu
def test_a_recorded_step_serves_every_length():
    """Also where the length that the graph starts from has just been written by the kernel in front."""
    tensors = operands(2, (8, 2), 128, 128, torch.float16, "cuda", 0, 400, mask=False)
    keys, values, at = (tensors[name] for name in ("keys", "values", "length"))
    graph = torch.cuda.CUDAGraph()
    step(tensors)
    with torch.cuda.graph(graph):
        y = ops.attention_step(*tensors.values(), *HOW)
        at.add_(1)
    at.fill_(0)
    for length in range(399):
        before = tensors | {"length": torch.tensor(length, device="cuda")}
        before |= {"keys": keys.clone(), "values": values.clone()}
        graph.replay()
        if length % 7 in (0, 1):
            require(y, keys, values, before)
    assert int(at) == 399


@gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_models_on_a_gpu(name, monkeypatch):
    """With heads of 64 columns, which the kernel takes: as by cuDNN's attention."""
    config = ARCHITECTURES[name]()
    config.head_dim = 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
    fuse_norms(model)
    calls, own = [], ops.attention_step
    monkeypatch.setattr(ops, "attention_step", lambda *given: calls.append(1) or own(*given))
    have = steps(model, step_kernels)
    assert calls
    monkeypatch.setattr(attention_heads, "takes", lambda *given: False)
    want = steps(model, step_kernels)
    assert have[1] == want[1]
    torch.testing.assert_close(have[0], want[0], rtol=0.05, atol=0.05)
