"""`kbit::attention_rest`: the op against attention in float64, its kernels, and rests of prompts by it."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import AutoModelForCausalLM, StaticCache

import cuda_on_cpu
import cuda_rows_on_cpu
import kbit
from graph_tape import Recorder, enable_on_cpu
from guards import guarded, untouched
from kbit.backends.cuda import attention_rests as kernels
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import attention, prompt_rests
from kbit.integrations.transformers.cache_argument import with_cache
from tiny_models import ARCHITECTURES

ops = torch.ops.kbit
gpu = pytest.mark.gpu
HALF = [torch.float16, torch.bfloat16]


def operands(batch, heads, tokens, columns, room, length, dtype, device="cpu"):
    """A query and a cache, which is NaN behind the tokens' own keys; how many are in front of them."""
    query = torch.randn(batch, tokens, heads[0], columns).to(device, dtype).transpose(1, 2)
    caches = torch.randn(2, batch, heads[1], room, columns).to(device, dtype)
    caches[:, :, :, length + tokens :] = math.nan
    return query, *caches, torch.tensor(length, device=device)


def exact(query, keys, values, length, scaling):
    """Attention in float64, [B, T, H, D], and the weighted sums of values' magnitudes."""
    end, shared = int(length) + query.shape[2], query.shape[1] // keys.shape[1]
    k, v = (x[:, :, :end].double().repeat_interleave(shared, 1) for x in (keys, values))
    scores = query.double() @ k.mT * scaling
    hidden = torch.ones(query.shape[2], end, dtype=torch.bool, device=query.device).tril(int(length))
    weights = scores.masked_fill(~hidden, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2), (weights @ v.abs()).transpose(1, 2)


def require(y, tensors, scaling):
    """y is attention; weights, what parts of keys give and the result are rounded to 16 bits, once each."""
    want, magnitude = exact(*tensors, scaling)
    eps = torch.finfo(y.dtype).eps
    scores = tensors[0].abs().amax().double() * tensors[1].nan_to_num().abs().amax() * y.shape[-1] * scaling
    bound = magnitude * (1.5 * eps + 8 * torch.finfo(torch.float32).eps * (scores + y.shape[-1])) + 1e-6
    assert ((y.double() - want).abs() <= bound).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (9, 1), (3, 3)]),
    st.integers(1, 6),
    st.sampled_from([3, 8, 64]),
    st.sampled_from([torch.float32, *HALF]),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from([0.1, 1.0]),
)
def test_it_is_attention(batch, heads, tokens, columns, dtype, length, more, scaling):
    torch.manual_seed(batch * 100 + length)
    tensors = operands(batch, heads, tokens, columns, length + tokens + more, length, dtype)
    require(ops.attention_rest(*tensors, scaling), tensors, scaling)


GIVEN = dict(
    zip(
        ("query", "keys", "values", "length"),
        operands(2, (4, 2), 3, 8, 9, 5, torch.float32),
        strict=True,
    )
)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": GIVEN["query"].long()}, TypeError, "query"),
        ({"query": GIVEN["query"][0]}, ValueError, "must have 4 dimensions, got"),
        ({"query": GIVEN["query"][:, :3]}, ValueError, "divide the 3 of query, got 2"),
        ({"query": GIVEN["query"].repeat(1, 1, 4, 1)}, ValueError, "room for 9 tokens, query has 12"),
        ({"keys": GIVEN["keys"][:1]}, ValueError, r"keys must be \[2, 2, 9, 8\], got \[1, 2, 9, 8\]"),
        ({"values": GIVEN["values"].half()}, TypeError, "values must be torch.float32"),
        ({"values": GIVEN["values"][:, :, :5]}, ValueError, r"values must be \[2, 2, 9, 8\]"),
        ({"length": torch.tensor(1.0)}, TypeError, "one int64, got 1 of torch.float32"),
        ({"length": torch.tensor(1, device="meta")}, ValueError, "length is on meta"),
    ],
)
def test_bad_arguments_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.attention_rest(*(GIVEN | change).values(), 1.0)


def test_opcheck():
    torch.library.opcheck(ops.attention_rest.default, (*GIVEN.values(), 0.5))
    assert ops.attention_rest(GIVEN["query"][:0], *(GIVEN[n][:0] for n in ("keys", "values")),
                              GIVEN["length"], 0.5).shape == (0, 3, 4, 8)  # fmt: skip


# -- the kernels around FlashAttention -----------------------------------------------------------------------


def flash(query, keys, values, rows, cuts, tokens, causal, scaling):
    """FlashAttention as its documentation says, a sequence after the other."""
    out = torch.zeros(query.shape, dtype=query.dtype)
    sums = torch.full((query.shape[1], len(query)), math.inf)
    for first, last, begin, end in zip(rows[:-1], rows[1:], cuts[:-1], cuts[1:], strict=True):
        if end == begin:
            continue
        q, k, v = query[first:last].float(), keys[begin:end].float(), values[begin:end].float()
        k, v = (x.repeat_interleave(query.shape[1] // keys.shape[1], 1) for x in (k, v))
        scores = torch.einsum("thd,lhd->htl", q, k) * scaling
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool).tril(int(end - begin) - tokens)
            scores = scores.masked_fill(~hidden, -math.inf)
        out[first:last] = torch.einsum("htl,lhd->thd", scores.softmax(-1), v).to(query.dtype)
        sums[:, first:last] = scores.logsumexp(-1)
    return out, sums


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    if (reason := cuda_on_cpu.unavailable_reason()) is not None:
        pytest.skip(reason)
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("rests_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "columns", "length", "splits"),
    [(1, (4, 2), 5, 64, 20, 4), (2, (3, 1), 17, 24, 2, 8), (1, (2, 2), 3, 8, 0, 3), (2, (2, 1), 4, 16, 7, 1)],
)
def test_kernels(batch, heads, tokens, columns, length, splits, dtype, monkeypatch, on_cpu):
    cuda_on_cpu.install(monkeypatch, on_cpu)
    monkeypatch.setattr(kernels, "_flash", flash)
    monkeypatch.setattr(kernels, "splits_of", lambda *sizes: splits)
    tensors = operands(batch, heads, tokens, columns, length + tokens + 3, length, dtype)
    query, keys, values = map(guarded, tensors[:3])
    out = guarded(torch.full((batch, tokens, heads[0], columns), math.nan, dtype=dtype))
    kernels.attention_rest(query, keys, values, tensors[3], 0.3, out)
    assert untouched(out)
    require(out, tensors, 0.3)


def test_what_is_no_number_stays_none(monkeypatch, on_cpu):
    cuda_on_cpu.install(monkeypatch, on_cpu)
    monkeypatch.setattr(kernels, "_flash", flash_as_it_is)
    monkeypatch.setattr(kernels, "splits_of", lambda *sizes: 3)
    query, keys, values, length = operands(1, (2, 1), 4, 8, 20, 9, torch.float16)
    keys[0, 0, 4, 0] = math.nan
    kernels.attention_rest(query, keys, values, length, 1.0, out := torch.empty(1, 4, 2, 8).half())
    assert out.isnan().all()


def flash_as_it_is(*given):
    out, sums = flash(*given)
    return out, torch.where(sums.isnan(), math.inf, sums)


@pytest.mark.parametrize(("length", "held"), [(-5, 0), (6, 6), (7, 6), (2**40, 6)])
def test_lengths_without_room_read_nothing_outside(length, held, monkeypatch, on_cpu):
    cuda_on_cpu.install(monkeypatch, on_cpu)
    seen = []

    def noted(query, keys, values, rows, cuts, *more):
        seen.append((rows.tolist(), cuts.tolist()))
        return flash(query, keys, values, rows, cuts, *more)

    monkeypatch.setattr(kernels, "_flash", noted)
    monkeypatch.setattr(kernels, "splits_of", lambda *sizes: 2)
    query, keys, values, _ = operands(1, (2, 1), 4, 8, 10, 6, torch.float16)
    kernels.attention_rest(query, keys, values, torch.tensor(length), 1.0, torch.empty(1, 4, 2, 8).half())
    assert seen == [([0, 4], [held, held + 4]), ([0, 4, 8], [0, held // 2, held])]


def test_what_they_do_not_take_the_reference_has(monkeypatch):
    monkeypatch.setattr(kernels.launcher, "load", None)
    for columns, dtype in ((12, torch.float16), (264, torch.float16), (16, torch.float32)):
        tensors = operands(1, (2, 1), 3, columns, 9, 5, dtype)
        kernels.attention_rest(*tensors, 0.2, out := torch.empty(1, 3, 2, columns, dtype=dtype))
        require(out, tensors, 0.2)


@given(st.integers(1, 4096), st.integers(1, 64), st.sampled_from([64, 128, 256]), st.integers(1, 200))
def test_splits(tokens, heads, columns, multiprocessors):
    assert 1 <= kernels.splits_of(tokens, heads, columns, multiprocessors) <= 8
    assert kernels.splits_of(4096, 64, columns, 132) == 1
    assert kernels.splits_of(64, 32, 128, 132) == 4


@gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("columns", [16, 64, 80, 128, 256])
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "length", "room"),
    [
        (1, (32, 4), 64, 6600, 8192),
        (1, (16, 2), 257, 3000, 3300),
        (2, (9, 3), 5, 3, 16),
        (1, (4, 4), 130, 1, 131),
        (3, (8, 2), 1, 500, 1024),
        (1, (6, 1), 1100, 700, 2048),
        (1, (2, 1), 7, 0, 7),
    ],
)
def test_on_a_gpu(batch, heads, tokens, length, room, columns, dtype):
    tensors = operands(batch, heads, tokens, columns, room, length, dtype, "cuda")
    y = ops.attention_rest(*tensors, columns**-0.5)
    require(y, tensors, columns**-0.5)
    for _ in range(20):
        assert torch.equal(ops.attention_rest(*tensors, columns**-0.5), y)


@gpu
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_queries_at_uneven_addresses_and_those_without_a_kernel(dtype):
    """Not aligned for 16 bytes: PyTorch's own attention with a mask has given wrong numbers for these."""
    query, *others = operands(1, (12, 4), 64, 128, 66, 2, dtype, "cuda")
    whole = torch.empty(1, 64, 12, 131, dtype=dtype, device="cuda")
    apart = whole[..., 1:129].transpose(1, 2).copy_(query)
    y = ops.attention_rest(apart, *others, 0.1)
    require(y, [query, *others], 0.1)
    for _ in range(20):
        assert torch.equal(ops.attention_rest(apart, *others, 0.1), y)


@gpu
def test_a_graph_reads_lengths_on_the_gpu():
    tensors = operands(1, (8, 2), 48, 128, 4096, 4000, torch.bfloat16, "cuda")
    for tensor in tensors[1:3]:
        tensor.nan_to_num_(0.0)
    ops.attention_rest(*tensors, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.attention_rest(*tensors, 0.1)
    for length in (4000, 1, 0, 2047, 4048):
        tensors[3].fill_(length)
        graph.replay()
        assert torch.equal(y, ops.attention_rest(*tensors, 0.1))
        require(y, tensors, 0.1)


# -- rests of prompts ----------------------------------------------------------------------------------------


def model_of(architecture, dtype=torch.bfloat16):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), dtype=dtype).eval()
    return kbit.quantize_model(model, QuantizationPolicy(search=False))


def logits_behind(model, ids, held, times=1):
    """Of what follows the first `held` tokens of a prompt, which a cache holds; and how long it is then."""
    cache = StaticCache(model.config, 64)
    with torch.no_grad():
        model(ids[:, :held], **with_cache(cache))
        before = [layer.cumulative_length.clone() for layer in cache.layers]
        for _ in range(times):
            for layer, length in zip(cache.layers, before, strict=True):
                layer.cumulative_length.copy_(length)
            found = model.generate(
                ids, **with_cache(cache), attention_mask=torch.ones_like(ids), max_new_tokens=1,
                do_sample=False, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
    return found.logits[0], int(cache.layers[0].get_seq_length())


@pytest.fixture
def unmasked(monkeypatch):
    """Without masks behind any number of keys; how many layers' calls that were."""
    monkeypatch.setattr(prompt_rests, "_FEW_KEYS", 0)
    calls = []
    own = attention.rest_attention

    def noted(*given, **named):
        found = own(*given, **named)
        calls.append(given[0])
        return found

    monkeypatch.setattr(attention, "rest_attention", noted)
    return calls


IDS = torch.randint(1, 30, (1, 33), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("held", [1, 20, 32])
def test_rests_run_without_masks(held, unmasked):
    model = model_of("llama")
    want, _ = logits_behind(model, IDS, held)
    recorder = Recorder()
    enable_on_cpu(model, recorder)
    have, length = logits_behind(model, IDS, held, 5)
    assert unmasked
    assert recorder.replayed >= 1
    assert length == IDS.shape[1]
    torch.testing.assert_close(have, want, atol=0.05, rtol=0.05)


def test_layers_without_a_kernel_get_masks(unmasked):
    """And what the attempt did to the cache is undone."""
    model = model_of("llama", torch.float32)
    want, _ = logits_behind(model, IDS, 20)
    enable_on_cpu(model)
    have, length = logits_behind(model, IDS, 20, 5)
    assert not unmasked
    assert length == IDS.shape[1]
    torch.testing.assert_close(have, want)
    assert model.get_compiled_call(None).prompts._rests._wants_masks


def test_models_whose_attention_goes_another_way_get_masks(unmasked, monkeypatch):
    model = model_of("llama")
    want, _ = logits_behind(model, IDS, 20)
    enable_on_cpu(model)
    monkeypatch.setattr(prompt_rests, "growing_layers", lambda cache: [*cache.layers, cache.layers[0]])
    have, length = logits_behind(model, IDS, 20, 5)
    assert length == IDS.shape[1]
    torch.testing.assert_close(have, want, atol=0.05, rtol=0.05)
    assert model.get_compiled_call(None).prompts._rests._wants_masks
