"""Keys and values into caches in one kernel: the op, and the caches of transformers that it is for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import LlamaConfig, StaticCache
from transformers.cache_utils import StaticLayer

from kbit.integrations.transformers import static_caches

ops = torch.ops.kbit
gpu = pytest.mark.gpu


def operands(shape, columns, dtype=torch.float32, device="cpu"):
    """Empty keys and values with room for so many; new ones, with heads behind tokens as models have them."""
    batch, heads, room, tokens = shape
    caches = [torch.full((batch, heads, room, width), 7.0).to(device, dtype) for width in columns]
    new = (torch.randn(batch, tokens, heads, width).to(device, dtype).transpose(1, 2) for width in columns)
    return *caches, *new


def defined(cache, new, length):
    """The cache afterwards."""
    fit = max(0, min(new.shape[2], cache.shape[2] - length))
    return torch.cat((cache[:, :, :length], new[:, :, :fit], cache[:, :, length + fit :]), 2)


def require_appended(given, length):
    keys, values, key, value = given
    want = defined(keys, key, length), defined(values, value, length)
    ops.cache_append(*given, torch.tensor(length, device=keys.device))
    assert torch.equal(keys, want[0])
    assert torch.equal(values, want[1])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(1, 2, 5, 1), (2, 3, 5, 2), (2, 1, 3, 4), (0, 2, 5, 1), (1, 2, 5, 0), (1, 2, 0, 1)]),
    st.sampled_from([(8, 8), (6, 2), (3, 0)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, 7),
)
def test_the_definition(shape, columns, dtype, length):
    require_appended(operands(shape, columns, dtype), length)


NAMES = ("keys", "values", "key", "value", "length")
ARGUMENTS = dict(zip(NAMES, (*operands((2, 3, 5, 1), (8, 4)), torch.tensor(2)), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": ARGUMENTS["key"].half()}, "key is torch.float16, its cache torch.float32"),
        ({"value": ARGUMENTS["value"][0]}, r"value must be \[B, H, T, D\] and its cache \[B, H, L, D\]"),
        ({"keys": ARGUMENTS["keys"].mT.contiguous().mT}, "contiguous, got"),
        ({"keys": ARGUMENTS["keys"][:, :, :4].contiguous()}, "must be alike in all but columns"),
        ({"length": torch.tensor(2.0)}, "length must be one int64, got 1 of torch.float32"),
        ({"length": torch.zeros(2).long()}, "length must be one int64, got 2"),
        ({"length": torch.tensor(2, device="meta")}, "tensors are on cpu and meta"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ops.cache_append(*(ARGUMENTS | change).values())


def test_opcheck():
    torch.library.opcheck(ops.cache_append.default, tuple(ARGUMENTS.values()))


def appended(cache, layers, sizes, device="cpu"):
    """A cache's tensors after tokens came, so many at a time."""
    generator = torch.Generator().manual_seed(0)
    for tokens in sizes:
        for layer in range(layers):
            new = (
                torch.randn(2, tokens, 2, 16, generator=generator).to(device).transpose(1, 2) for _ in "kv"
            )
            keys, values = cache.update(*new, layer)
            assert keys is cache.layers[layer].keys
            assert values is cache.layers[layer].values
    return [(layer.keys, layer.values, layer.cumulative_length) for layer in cache.layers]


def require_same_cache(device):
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
    want = appended(StaticCache(config, max_cache_len=8), 2, (3, 1, 2), device)
    cache, own = StaticCache(config, max_cache_len=8), StaticLayer.update
    with static_caches.fused_updates():
        assert StaticLayer.update is not own
        have = appended(cache, 2, (3, 1, 2), device)
    assert StaticLayer.update is own
    for one, other in zip(have, want, strict=True):
        assert all(map(torch.equal, one, other))


def test_caches_of_transformers(monkeypatch):
    require_same_cache("cpu")  # by its own way
    calls, op = [], ops.cache_append
    monkeypatch.setattr(ops, "cache_append", lambda *given: calls.append(given) or op(*given))
    monkeypatch.setattr(static_caches, "appends", lambda layer, key, value: layer.is_initialized)
    require_same_cache("cpu")
    assert len(calls) == 4  # the first tokens allocate


@pytest.fixture
def two_layers(monkeypatch):
    """A cache of a CPU, with three tokens, that takes others as on a GPU; new ones."""
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
    cache = StaticCache(config, max_cache_len=8)
    appended(cache, 2, (3,))
    monkeypatch.setattr(static_caches, "appends", lambda layer, key, value: key.dtype == layer.keys.dtype)
    return cache, torch.ones(2, 2, 1, 16)


def lengths(cache):
    return [int(layer.cumulative_length) for layer in cache.layers]


def test_lengths_of_layers_grow_together(two_layers):
    cache, new = two_layers
    with static_caches.fused_updates():
        cache.update(new, new, 0)
        cache.update(new.repeat(1, 1, 2, 1), new.repeat(1, 1, 2, 1), 1)
        assert lengths(cache) == [3, 3]
        cache.update(new, new, 0)  # once more: behind those that it has by now
        assert lengths(cache) == [4, 5]
        assert cache.get_seq_length() == 5  # asked for
        cache.update(new, new, 1)
    assert lengths(cache) == [5, 6]
    assert bool((cache.layers[0].keys[:, :, 3:5] == 1).all())
    assert not cache.layers[0].keys[:, :, 5:].any()


def test_a_step_that_fails_leaves_lengths(two_layers):
    cache, new = two_layers

    @static_caches.fused_updates()
    def fail():
        cache.update(new, new, 0)
        raise RuntimeError("midway")

    with pytest.raises(RuntimeError, match="midway"):
        fail()
    assert lengths(cache) == [3, 3]
    cache.update(new, new, 0)
    assert lengths(cache) == [4, 3]


def test_a_layers_own_update_sees_its_length(two_layers, monkeypatch):
    cache, new = two_layers
    with static_caches.fused_updates():
        cache.update(new, new, 0)
        monkeypatch.setattr(static_caches, "appends", lambda *given: False)
        cache.update(new, new, 0)
        assert lengths(cache) == [5, 3]
    assert bool((cache.layers[0].keys[:, :, 3:5] == 1).all())


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "columns"),
    [
        ((1, 4, 256, 1), (128, 128)),
        ((32, 8, 64, 1), (128, 128)),
        ((2, 20, 33, 7), (192, 128)),
        ((3, 2, 9, 5), (12, 4)),  # in 16 bits no whole pieces: PyTorch's
    ],
)
def test_the_kernel_gives_the_definition(shape, columns, dtype):
    for length in (0, 3, shape[2] - 1, shape[2], shape[2] + 5):
        require_appended(operands(shape, columns, dtype, "cuda"), length)


@gpu
def test_caches_of_transformers_on_a_gpu(monkeypatch):
    calls, op = [], ops.cache_append
    monkeypatch.setattr(ops, "cache_append", lambda *given: calls.append(given) or op(*given))
    require_same_cache("cuda")
    assert len(calls) == 4
