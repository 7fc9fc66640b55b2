"""Attention without copies of keys and values gives what transformers' own gives."""

from __future__ import annotations

import concurrent.futures
import contextlib

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, LlavaConfig, StaticCache, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kbit.integrations.transformers import attention
from kbit.integrations.transformers.additive_masks import additive
from kbit.integrations.transformers.attention import (
    PROMPTS,
    SDPA,
    STEPS,
    MaskWantedError,
    causal_without_masks,
    runs_by,
    shared_heads,
    with_additive_masks,
)
from kbit.integrations.transformers.cache_argument import with_cache
from tiny_models import build

gpu = pytest.mark.gpu
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])  # the second is shorter, padded on the left


class Layer(nn.Module):
    """What attention asks of a layer."""

    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def operands(batch, heads, shared, tokens, keys, head_dim, dtype=torch.float32, device="cpu"):
    """A query as models have it, with heads behind tokens; keys, values; which keys count, not all."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype)

    query = normal(batch, tokens, heads, head_dim).transpose(1, 2)
    key, value = normal(batch, shared, keys, head_dim), normal(batch, shared, keys, head_dim)
    counts = torch.arange(keys) <= keys // 2 + torch.arange(tokens)[:, None]
    mask = counts.expand(batch, 1, tokens, keys).clone()
    mask[0, :, :, : keys // 4] = False
    return query, key, value, mask.to(device)


@pytest.fixture
def cudnn(monkeypatch):
    """Has cuDNN take everything, and operators stand in for its kernel. Returns the calls."""
    calls = []

    def takes(*tensors):
        calls.append([tuple(tensor.shape) for tensor in tensors])
        return True

    def by_operators(query, key, value, mask, scaling):
        assert mask.dtype == query.dtype
        given = {"attn_mask": mask, "scale": scaling, "enable_gqa": True}
        return nn.functional.scaled_dot_product_attention(query, key, value, **given)

    monkeypatch.setattr(attention, "_cudnn_takes", takes)
    monkeypatch.setattr(attention, "_by_cudnn", by_operators)
    return calls


def switches():
    """Of PyTorch's attention, in the whole process."""
    names = "flash", "mem_efficient", "math", "cudnn"
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in names}


class Watched(TorchDispatchMode):
    """Notes operators meanwhile, with their arguments, and what `switches` were then."""

    def __init__(self):
        super().__init__()
        self.operators, self.switches = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append((func, args, kwargs or {}))
        self.switches.append(switches())
        return func(*args, **(kwargs or {}))

    def cudnn(self):
        """Arguments of cuDNN's kernel by name; it ran once."""
        kernel = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        (given,) = [(args, kwargs) for func, args, kwargs in self.operators if func is kernel]
        names = [argument.name for argument in kernel._schema.arguments]
        return dict(zip(names, given[0], strict=False)) | given[1]


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("tokens", [1, 3])
def test_it_gives_what_transformers_gives(cudnn, tokens, scaling):
    given = operands(2, 8, 2, tokens, 40, 16)
    want, _ = sdpa_attention_forward(Layer(4), *given, scaling=scaling)
    for mask in (given[3], additive(given[3], torch.float32)):
        have, weights = attention.attention(Layer(4), *given[:3], mask, scaling=scaling)
        assert weights is None
        assert have.shape == want.shape
        assert have.is_contiguous()
        torch.testing.assert_close(have, want)
    assert len(cudnn) == 2


@pytest.mark.parametrize(("groups", "name"), [(1, "nothing"), (4, "position_bias")])
def test_whatever_else_is_asked_for_is_left_to_transformers(cudnn, groups, name):
    more = {name: torch.zeros(1, 1, 1, 40)}
    given = operands(2, 8, 8 // groups, 1, 40, 16)
    want, _ = sdpa_attention_forward(Layer(groups), *given, **more)
    assert torch.equal(attention.attention(Layer(groups), *given, **more)[0], want)
    unmasked = attention.attention(Layer(groups), *given[:3], None)[0]
    assert torch.equal(unmasked, sdpa_attention_forward(Layer(groups), *given[:3], None)[0])
    assert not cudnn


def test_a_cpu_has_no_cudnn():
    given = operands(2, 8, 2, 1, 40, 16)
    assert not attention._cudnn_takes(*given)
    want, _ = sdpa_attention_forward(Layer(4), *given)
    assert torch.equal(attention.attention(Layer(4), *given)[0], want)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ["additive", "boolean"])
def test_cudnn_is_called_without_pytorchs_switches(kind, learns, monkeypatch):
    """They are the whole process's: meanwhile, attention of other threads would have no kernel."""
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: True)
    *given, mask = operands(2, 8, 2, 3, 40, 16, torch.float16, "meta")
    mask = additive(mask, torch.float16) if kind == "additive" else mask
    given[1].requires_grad_(learns)
    before = switches()
    with Watched() as watched:
        have = attention.attention(Layer(4), *given, mask, scaling=0.3)[0]
    assert have.shape == (2, 3, 8, 16)
    assert have.is_contiguous()
    assert watched.switches == [before] * len(watched.switches)
    asked = watched.cudnn()
    assert asked["attn_bias"].dtype == torch.float16
    assert asked["attn_bias"].shape == (2, 1, 3, 40)
    assert (asked["compute_log_sumexp"], asked["scale"]) == (learns, 0.3)
    assert asked["key"].shape == (2, 2, 40, 16)


def test_cudnns_kernel_can_be_traced(monkeypatch, own_compilations):
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: True)
    given = operands(2, 8, 2, 1, 40, 16, torch.float16, "meta")
    traced = torch.compile(attention.attention, fullgraph=True, dynamic=False, backend="aot_eager")
    assert traced(Layer(4), *given)[0].shape == (2, 1, 8, 16)


def test_cudnn_is_asked_again_where_pytorchs_switches_are_others(monkeypatch):
    """Whether it takes tensors of some shapes is kept."""
    asked, cuda, cpu = [], torch.backends.cuda, torch.device("cpu")
    monkeypatch.setattr(cuda, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(cuda, "can_use_cudnn_attention", lambda given: asked.append(given) or enabled())
    shapes = (1, 4, 1, 24), (1, 2, 8, 24), (1, 2, 8, 24), (1, 1, 1, 8)

    def enabled():
        return cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()

    def takes(dtype=torch.float16):
        return attention._ask(cpu, dtype, shapes)

    attention._cudnn_takes_shapes.cache_clear()
    assert [takes(), takes(), len(asked)] == [True, True, 1]
    with sdpa_kernel(SDPBackend.MATH):
        assert not takes()
    assert takes()
    torch.use_deterministic_algorithms(True)
    try:
        assert not takes()
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", torch.bfloat16):  # would have PyTorch's attention compute in that
        assert not takes()
        assert takes(torch.bfloat16)
    attention._cudnn_takes_shapes.cache_clear()


def registered():
    """What goes by the name "sdpa"."""
    return AttentionInterface()[SDPA], AttentionMaskInterface()[SDPA]


def test_transformers_functions_are_put_back():
    """Models keep the name of their attention, by which some do things: sparse attention, for one."""
    config, own = build("llama", torch.float32).config, registered()
    with shared_heads():
        assert (runs_by(config, STEPS), runs_by(config, PROMPTS)) == (True, False)
        assert not set(registered()) & set(own)
        with causal_without_masks():
            assert (runs_by(config, STEPS), runs_by(config, PROMPTS)) == (False, True)
        assert runs_by(config, STEPS)
    with pytest.raises(RuntimeError, match="stop"), shared_heads():
        raise RuntimeError("stop")
    assert registered() == own
    assert not runs_by(config, STEPS)
    config._attn_implementation = "eager"
    with shared_heads():
        assert not runs_by(config, STEPS)


def test_other_threads_and_other_functions_keep_theirs(monkeypatch):
    given, calls = operands(2, 8, 2, 1, 40, 16), []
    monkeypatch.setattr(attention, "attention", lambda *_, **__: calls.append("steps"))
    with shared_heads():
        there = concurrent.futures.ThreadPoolExecutor().submit(registered()[0], Layer(4), *given).result()
        assert torch.equal(there[0], sdpa_attention_forward(Layer(4), *given)[0])
        registered()[0](Layer(4), *given)
    assert calls == ["steps"]
    monkeypatch.setitem(AttentionInterface._global_mapping, SDPA, sorted)
    with shared_heads():
        assert registered()[0] is sorted


def test_masks_of_other_kinds_are_not_left_out():
    with causal_without_masks():
        assert registered()[1](2, 5, 5) is None
        for more in ({"allow_is_causal_skip": False}, {"local_size": 3}):
            with pytest.raises(MaskWantedError):
                registered()[1](2, 5, 5, **more)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite"])
def test_prompts_without_masks_are_causal(architecture, monkeypatch):
    """Also where transformers, as while a graph is recorded, would make a mask in any case."""
    model, ids = build(architecture, torch.float32), torch.randint(8, (2, 7))
    masks, own = [], torch.nn.functional.scaled_dot_product_attention

    def seen(*given, attn_mask=None, **named):
        masks.append(attn_mask)
        return own(*given, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    monkeypatch.setattr(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: False)
    with torch.no_grad():
        want = model(ids).logits
        assert masks
        assert all(mask is not None for mask in masks)
        masks.clear()
        with causal_without_masks():
            have = model(ids).logits
    assert masks
    assert all(mask is None for mask in masks)
    torch.testing.assert_close(have, want)
    assert model.config._attn_implementation == "sdpa"


def test_masks_are_those_of_the_decoder():
    model, mask = nn.Module(), torch.ones(1, 1, 1, 2, dtype=torch.bool)
    model.config, model.dtype = LlavaConfig(), torch.float16
    model.config._attn_implementation = {"": "sdpa", "text_config": "eager", "vision_config": "sdpa"}
    with shared_heads():
        assert with_additive_masks(model, {"attention_mask": mask})["attention_mask"] is mask
        model.config.text_config._attn_implementation = "sdpa"
        assert with_additive_masks(model, {"attention_mask": mask})["attention_mask"].dtype == torch.float16


def test_masks_become_additive_once():
    model, mask = build("llama", torch.float32), torch.tensor([True, False]).expand(1, 1, 1, 2)
    want = torch.tensor([0, -torch.inf]).expand(1, 1, 1, 2)
    inputs = {"attention_mask": {"full_attention": mask, "other": None}, "input_ids": MASK}
    assert with_additive_masks(model, inputs) is inputs
    with shared_heads():
        have = with_additive_masks(model, inputs)
        tokens = with_additive_masks(model, {"attention_mask": MASK})["attention_mask"]
    assert torch.equal(have["attention_mask"]["full_attention"], want)
    assert have["input_ids"] is MASK
    assert have["attention_mask"]["other"] is None
    assert tokens is MASK


@torch.no_grad()
def decoded(model, steps, around):
    """Logits of a padded prompt and of single tokens after it, with a cache of fixed size."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    mask, ids, logits = MASK.to(model.device), 2 + MASK.to(model.device), []
    for _ in range(steps):
        with around:
            inputs = with_additive_masks(model, {"input_ids": ids, "attention_mask": mask})
            logits.append(model(**inputs, **with_cache(cache)).logits[:, -1])
        ids, mask = logits[-1].argmax(-1, keepdim=True), nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(logits)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_models_give_the_same_logits(cudnn, architecture):
    model = build(architecture, torch.float32)
    want = decoded(model, 4, contextlib.nullcontext())
    assert not cudnn
    for _ in range(2):
        torch.testing.assert_close(decoded(model, 4, Again()), want)
    assert cudnn


class Again:
    """`shared_heads` that can be entered several times."""

    def __enter__(self):
        self.context = shared_heads()
        self.context.__enter__()

    def __exit__(self, *error):
        return self.context.__exit__(*error)


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("tokens", "keys"), [(1, 7), (1, 333), (1, 2048), (3, 1001), (64, 320)])
def test_cudnn_against_float64(tokens, keys, head_dim, dtype):
    given = operands(2, 12, 3, tokens, keys, head_dim, dtype, "cuda")
    mask = additive(given[3], dtype)
    assert attention._cudnn_takes(*given[:3], mask)
    query, key, value = (tensor.double() for tensor in given[:3])
    key, value = key.repeat_interleave(4, 1), value.repeat_interleave(4, 1)
    scores = (query @ key.transpose(2, 3) * head_dim**-0.5).masked_fill(~given[3], -torch.inf)
    want = (scores.softmax(-1) @ value).transpose(1, 2)
    have, _ = attention.attention(Layer(4), *given[:3], mask)
    # Probabilities are rounded to 16 bits before they meet the values, which are below 6; so are results.
    torch.testing.assert_close(have.double(), want, rtol=0, atol=12 * torch.finfo(dtype).eps)
    assert torch.equal(have, attention.attention(Layer(4), *given[:3], mask)[0])


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masks", ["each", "one"])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_cudnn_gives_what_pytorchs_attention_gives_by_it(scaling, tokens, batch, masks, dtype):
    """Bit for bit, of grouped heads with an additive mask; and no switch of PyTorch's changes."""
    *given, there = operands(batch, 32, 8, tokens, 320, 128, dtype, "cuda")
    mask = additive(there[:1] if masks == "one" else there, dtype)
    assert attention._cudnn_takes(*given, mask)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        want = nn.functional.scaled_dot_product_attention(
            *given, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    before = switches()
    with Watched() as watched:
        have = attention._by_cudnn(*given, mask, scaling)
    assert torch.equal(have, want)
    assert have.stride() == want.stride()
    assert watched.cudnn()
    assert watched.switches == [before] * len(watched.switches)
    assert switches() == before


@gpu
def test_rows_in_pieces_and_several_dtypes_are_left_to_transformers():
    """As PyTorch's attention asks no kernel to take them."""
    query, key, value, mask = operands(2, 8, 2, 1, 40, 64, torch.float16, "cuda")
    additive_mask = additive(mask, torch.float16)
    assert attention._cudnn_takes(query, key, value, mask)
    assert attention._cudnn_takes(query, key, value, additive_mask)
    in_pieces = key.transpose(2, 3).contiguous().transpose(2, 3)
    assert not attention._cudnn_takes(query, in_pieces, value, additive_mask)
    want, _ = sdpa_attention_forward(Layer(4), query, in_pieces, value, mask)
    assert torch.equal(attention.attention(Layer(4), query, in_pieces, value, mask)[0], want)
    assert not attention._cudnn_takes(query, key.bfloat16(), value, additive_mask)
    assert not attention._cudnn_takes(query, key, value, additive_mask[..., :1].expand_as(additive_mask))
    with torch.autocast("cuda", torch.bfloat16):
        assert not attention._cudnn_takes(query, key, value, additive_mask)


@gpu
def test_keys_and_values_are_not_copied():
    given = operands(1, 32, 4, 1, 16384, 128, torch.bfloat16, "cuda")
    attention.attention(Layer(8), *given)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention.attention(Layer(8), *given)
    assert torch.cuda.max_memory_allocated() - before < given[1].nbytes


@gpu
def test_what_cudnn_does_not_take_is_left_to_transformers():
    for dtype, keys in ((torch.float32, 40), (torch.float16, 1)):
        given = operands(2, 8, 2, 1, keys, 64, dtype, "cuda")
        given = (*given[:3], torch.ones_like(given[3]))
        assert not attention._cudnn_takes(*given)
        want, _ = sdpa_attention_forward(Layer(4), *given)
        assert torch.equal(attention.attention(Layer(4), *given)[0], want)


@gpu
def test_compiled_layers_ask_cudnn_too(monkeypatch):
    given = operands(1, 8, 2, 1, 256, 64, torch.float16, "cuda")
    asked = []
    monkeypatch.setattr(attention, "_cudnn_takes_shapes", lambda *shapes: asked.append(shapes) or True)

    def run(*tensors):
        return attention.attention(layer, *tensors)[0]

    layer = Layer(4)
    with shared_heads():
        have = torch.compile(run, fullgraph=True, dynamic=False)(*given)
    assert len(asked) == 1
    torch.testing.assert_close(have, attention.attention(layer, *given)[0], rtol=1e-2, atol=1e-3)
