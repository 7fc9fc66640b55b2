"""`kbit::gated_delta_step`: its checks, what transformers' layers compute, and the GPU's kernel."""

from __future__ import annotations

import pytest
import torch
from transformers import StaticCache

from gated_delta_steps import compare, operands, run
from kbit.backends import reference
from kbit.backends.cuda import gated_delta
from kbit.integrations.transformers import linear_attention
from kbit.integrations.transformers.step_kernels import step_kernels
from tiny_models import build

op = torch.ops.kbit.gated_delta_step
GIVEN = operands(2, 2, 2, torch.float16, dim=8, taps=3)


class Op:
    """The op, called as a backend is."""

    @staticmethod
    def gated_delta_step(**named):
        out = named.pop("out")
        out.copy_(op(**named))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_cpu_it_is_the_reference(dtype):
    given = operands(2, 2, 2, dtype, dim=8, taps=3)
    for have, want in zip(run(given, Op), run(given, reference), strict=True):
        assert torch.equal(have, want)


def test_opcheck():
    torch.library.opcheck(op.default, (*GIVEN.values(), 1e-6))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"projected": GIVEN["projected"].long()}, TypeError, "projected"),
        ({"projected": GIVEN["projected"][:, :-8]}, ValueError, r"projected must be \[2, 80\]"),
        ({"projected": GIVEN["projected"][:, :64]}, ValueError, "as many heads of keys as divide them"),
        ({"gates": GIVEN["gates"].float()}, TypeError, "gates must be torch.float16"),
        ({"gates": GIVEN["gates"][:1]}, ValueError, r"gates must be \[2, 8\], got \[1, 8\]"),
        ({"state": GIVEN["state"].half()}, TypeError, "state must be torch.float32"),
        ({"state": GIVEN["state"][..., :4]}, ValueError, r"\[B, V, D, D\]"),
        ({"state": GIVEN["state"].transpose(2, 3)}, ValueError, "state is written in place"),
        ({"window": GIVEN["window"][..., :2]}, ValueError, r"taps must be \[64, 2\]"),
        ({"log_decay": GIVEN["log_decay"].float()}, TypeError, "log_decay must be torch.float16"),
        ({"norm": torch.ones(8, dtype=torch.float16, device="meta")}, ValueError, "norm is on meta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        op(**(GIVEN | change), eps=1e-6)


def behind_a_prompt(model, device):
    """A cache that holds a prompt, and the next tokens."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = torch.tensor([[3, 5, 7, 2, 9], [2, 4, 6, 8, 1]], device=device)
    model(ids, past_key_values=cache)
    return cache, torch.tensor([[1], [4]], device=device)


def logits_of_steps(model, device, fused, monkeypatch):
    calls = []
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(linear_attention, "_is_on_gpu", lambda x: fused)
        patch.setattr(gated_delta, "_DIM", model.config.linear_key_head_dim)
        real = linear_attention._states
        patch.setattr(
            linear_attention, "_states", lambda *given: (calls.append(1), real(*given))[1] if fused else None
        )
        cache, token = behind_a_prompt(model, device)
        steps = []
        for _ in range(3):
            with linear_attention.fused_linear_attention():
                steps.append(model(token, past_key_values=cache).logits)
            token = (token + 5) % 32
    assert bool(calls) == fused
    return torch.stack(steps)


def test_layers_of_transformers_compute_the_same(monkeypatch):
    model = build("qwen3_next", torch.float32, spread=False).eval()
    own = logits_of_steps(model, "cpu", False, monkeypatch)
    ops = []
    monkeypatch.setattr(torch.ops.kbit, "gated_delta_step", lambda *given: ops.append(1) or op(*given))
    fused = logits_of_steps(model, "cpu", True, monkeypatch)
    assert ops
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)


def test_prompts_and_other_devices_keep_their_own(monkeypatch):
    model = build("qwen3_next", torch.float32, spread=False).eval()
    monkeypatch.setattr(torch.ops.kbit, "gated_delta_step", None)
    with torch.no_grad(), step_kernels(model):
        cache, token = behind_a_prompt(model, "cpu")
        model(token, past_key_values=cache)


def unlike(layer, how):
    """A layer of which one thing is not what the kernel takes."""
    if how == "activation":
        layer.norm.activation = "sigmoid"
    elif how == "bias":
        layer.conv1d.bias = torch.nn.Parameter(torch.zeros(layer.conv1d.weight.shape[0]))
    elif how == "weight":
        layer.norm.double()
    elif how == "gates":
        layer.A_log.data = layer.A_log.data.double()
    elif how == "offloaded":
        layer.conv1d.to("meta")


@pytest.mark.parametrize("how", ["", "activation", "bias", "weight", "gates", "offloaded", "width"])
def test_layers_that_the_kernel_does_not_take(how, monkeypatch):
    model = build("qwen3_next", torch.float32, spread=False).eval()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    with torch.no_grad():
        cache, _ = behind_a_prompt(model, "cpu")
    monkeypatch.setattr(linear_attention, "_is_on_gpu", lambda x: True)
    if how != "width":
        monkeypatch.setattr(gated_delta, "_DIM", model.config.linear_key_head_dim)
    unlike(layer, how)
    x = torch.zeros(2, 1, model.config.hidden_size)
    assert (linear_attention._states(layer, x, cache, None) is None) == bool(how)
    assert linear_attention._states(layer, x, cache, torch.ones(2, 1)) is None
    assert linear_attention._states(layer, x, None, None) is None
    assert linear_attention._states(layer, torch.cat((x, x), 1), cache, None) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("batch", "k_heads", "ratio"), [(1, 16, 2), (3, 5, 1), (32, 16, 2)])
def test_on_a_gpu(batch, k_heads, ratio, wide, dtype):
    given = {name: value.cuda() for name, value in operands(batch, k_heads, ratio, dtype, wide).items()}
    have = run(given, Op)
    compare(have, run(given, reference))
    for _ in range(200):
        assert all(map(torch.equal, run(given, Op), have))
    torch.library.opcheck(op.default, (*given.values(), 1e-6))
