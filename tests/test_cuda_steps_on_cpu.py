"""The kernels of attention heads and caches, run on the CPU, give what others give and touch nothing else."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
import latent_steps
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import caches, heads, latent, masks, position
from kbit.backends.cuda import norm as norms_of_rows
from kbit.backends.cuda.driver import DeviceLimits

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_steps_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


def operands(batch, heads, tokens, columns, turned, dtype, angles):
    query, key = (guarded(torch.randn(batch, tokens, of, columns).to(dtype)).transpose(1, 2) for of in heads)
    cos, sin = (guarded(torch.randn(angles, tokens, turned).to(dtype)) for _ in range(2))
    return query, key, cos, sin


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "columns", "turned"), [((4, 2), 64, 64), ((1, 3), 128, 32), ((2, 0), 16, 16), ((0, 2), 24, 16)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_heads(heads, columns, turned, interleaved, dtype):
    for batch, tokens, angles in ((1, 1, 1), (2, 3, 1), (2, 3, 2)):
        given = operands(batch, heads, tokens, columns, turned, dtype, angles)
        outs = [guarded(torch.full((batch, tokens, of, columns), float("nan"), dtype=dtype)) for of in heads]
        position.rotary(*given, *outs, interleaved)
        want = [torch.empty_like(out) for out in outs]
        reference.rotary(*given, *want, interleaved)
        for out, expected in zip(outs, want, strict=True):
            assert untouched(out)
            assert torch.equal(out, expected)


def test_strides_of_any_kind():
    query, key, cos, sin = operands(2, (4, 2), 3, 64, 32, torch.float16, 2)
    wide = torch.randn(2, 4, 3, 192).half()
    for one in (wide[..., :64], wide[..., 64:128], query.contiguous(), query[:, ::2]):
        outs = [torch.empty_like(x.transpose(1, 2).contiguous()) for x in (one, key)]
        want = [torch.empty_like(out) for out in outs]
        position.rotary(one, key, cos, sin, *outs)
        reference.rotary(one, key, cos, sin, *want)
        assert all(map(torch.equal, outs, want))


@pytest.mark.parametrize(
    "given", [(8, 8, torch.float32), (12, 8, torch.float16), (16, 8, torch.float16)], ids=str
)
def test_what_it_does_not_take_the_reference_computes(given, monkeypatch):
    monkeypatch.setattr(position.launcher, "load", None)
    query, key, cos, sin = operands(1, (2, 1), 3, *given, 1)
    outs = [torch.empty_like(x.transpose(1, 2).contiguous()) for x in (query, key)]
    position.rotary(query, key, cos, sin, *outs)
    reference.rotary(query, key, cos, sin, *(want := [torch.empty_like(out) for out in outs]))
    assert all(map(torch.equal, outs, want))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "columns"), [(1, (64, 64)), (3, (24, 8))])
def test_caches(heads, columns, dtype):
    for tokens, length in ((1, 0), (3, 2), (3, 5), (2, 6), (2, 2**40)):
        new = [torch.randn(2, tokens, heads, width).to(dtype).transpose(1, 2) for width in columns]
        outs = [guarded(torch.randn(2, heads, 6, width).to(dtype)) for width in columns]
        want, at = [out.clone() for out in outs], torch.tensor(length)
        caches.cache_append(*outs, *new, at)
        reference.cache_append(*want, *new, at)
        for out, expected in zip(outs, want, strict=True):
            assert untouched(out)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 24), (2, 3, 13), (3, 2, 1030)])
def test_masks(sizes, dtype):
    keys = sizes[-1]
    for first in (0, keys // 2, keys - 1, 2**40):
        for known in (None, 0, 5, keys, keys + 3):
            there = None if known is None else guarded(torch.rand(sizes[0], known) < 0.8)
            out = guarded(torch.full(sizes, float("nan"), dtype=dtype))
            masks.causal_mask(torch.tensor(first), there, out)
            reference.causal_mask(torch.tensor(first), there, want := torch.empty_like(out))
            assert untouched(out)
            assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("shape", "half"), [((1, 1), 64), ((2, 3), 5), ((3, 50), 16)])
def test_angles(shape, half, dtype):
    frequencies, positions = guarded(torch.rand(half)), guarded(torch.randint(2**18, shape))
    outs = [guarded(torch.full((*shape, 2 * half), float("nan"), dtype=dtype)) for _ in range(2)]
    position.rotary_angles(frequencies, positions, 1.2, *outs)
    each = (positions[..., None].float() * frequencies).double()
    for out, of in zip(outs, (torch.cos, torch.sin), strict=True):
        assert untouched(out)
        want = torch.cat((of(each), of(each)), -1) * 1.2
        torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def projections(sizes, columns, dtype, wide=0):
    """Queries, keys and values [B, T, heads, D] as slices of one product, `wide` columns between heads."""
    batch, tokens, of_query, of_key = sizes
    each = columns + wide
    product = guarded(torch.randn(batch, tokens, (of_query + 2 * of_key) * each).to(dtype))
    parts = product.split([of_query * each, of_key * each, of_key * each], -1)
    return [part.view(batch, tokens, -1, each)[..., :columns] for part in parts]


def one_behind_the_other(new, norms, angle, outs, at, settings, query):
    """The same by three kernels."""
    *turned, value = (x.contiguous() for x in new)
    if norms[0] is not None:
        normed = [torch.empty_like(x) for x in turned]
        for x, norm, y in zip(turned, norms, normed, strict=True):
            norms_of_rows.rms_norm(x, norm, *settings, y)
        turned = normed
    key = torch.empty_like(turned[1])
    position.rotary(*(x.transpose(1, 2) for x in turned), *angle, query, key)
    caches.cache_append(*outs, key.transpose(1, 2), value.transpose(1, 2), at)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("columns", "turned"), [(64, 64), (128, 32), (256, 64), (24, 16), (136, 128)])
@pytest.mark.parametrize("how", [None, (1e-6, False, True), (1e-5, True, False)])
def test_heads_of_new_tokens(columns, turned, how, dtype):
    cases = (((1, 1, 4, 2), 3, 1, 0), ((2, 3, 2, 1), 4, 2, 8), ((3, 1, 3, 3), 2**40, 1, columns))
    for (batch, tokens, of_query, of_key), length, angles, wide in cases:
        new = projections((batch, tokens, of_query, of_key), columns, dtype, wide)
        norms = [how and guarded(torch.randn(columns).to(dtype)) for _ in range(2)]
        angle = [guarded(torch.randn(angles, tokens, turned).to(dtype)) for _ in range(2)]
        outs = [guarded(torch.randn(batch, of_key, 6, columns).to(dtype)) for _ in range(2)]
        query = guarded(torch.full((batch, tokens, of_query, columns), float("nan"), dtype=dtype))
        want, wanted = [out.clone() for out in outs], torch.empty_like(query)
        at, settings = torch.tensor(length), how or (0.0, False, True)
        heads.append_heads(*new, *norms, *angle, *outs, at, *settings, query)
        one_behind_the_other(new, norms, angle, want, at, settings, wanted)
        for out, expected in zip((query, *outs), (wanted, *want), strict=True):
            assert untouched(out)
            assert torch.equal(out, expected)


def test_heads_that_it_does_not_take_the_reference_has(monkeypatch):
    monkeypatch.setattr(heads.launcher, "load", None)
    for columns, turned, dtype in ((12, 8, torch.float16), (264, 16, torch.float16), (16, 16, torch.float32)):
        new, at = projections((1, 2, 2, 1), columns, dtype), torch.tensor(1)
        angle = torch.randn(2, 1, 2, turned).to(dtype)
        outs = [torch.zeros(1, 1, 4, columns, dtype=dtype) for _ in range(2)]
        want, query = [out.clone() for out in outs], torch.empty(1, 2, 2, columns, dtype=dtype)
        heads.append_heads(*new, None, None, *angle, *outs, at, 0.0, False, True, query)
        reference.append_heads(*new, None, None, *angle, *want, at, 0.0, False, True, torch.empty_like(query))
        assert all(map(torch.equal, outs, want))


def one_multiprocessor(index):
    """Whose blocks take all chunks, one behind the other, and have room for one."""
    return DeviceLimits(multiprocessors=1, shared_bytes=99 * 1024, arch="89")


DEVICES = (lambda index: cuda_on_cpu.H200, one_multiprocessor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "room", "lengths", "how"),
    [
        (2, 5, 70, (0, 31, 32, 69, 70, 75), latent_steps.HOW),
        (1, 40, 40, (17, 39), (0.07, 1e-5, True, False, False)),
        (1, 20, 100, (99,), latent_steps.HOW),
    ],
)
def test_latent_attention(batch, heads, room, lengths, how, dtype, monkeypatch):
    torch.manual_seed(heads)
    for length in lengths:
        for mask in (True, False):
            tensors = latent_steps.operands(batch, heads, 512, 64, dtype, "cpu", length, mask, room)
            given = {name: None if one is None else guarded(one.clone()) for name, one in tensors.items()}
            given["length"] = tensors["length"]
            out = guarded(torch.full((batch, heads, 512), float("nan"), dtype=dtype))
            monkeypatch.setattr(latent.driver, "device_limits", DEVICES[mask])
            latent.latent_attention_step(*given.values(), *how, out)
            written = (out, given["latents"], given["keys"])
            assert all(map(untouched, written))
            latent_steps.require(*written, tensors, how)


def test_latent_attention_by_a_mask_of_least_numbers():
    tensors = latent_steps.operands(1, 5, 512, 64, torch.bfloat16, "cpu", 40)
    tensors["mask"].fill_(torch.finfo(torch.bfloat16).min)
    given = {name: one.clone() for name, one in tensors.items()}
    out = torch.empty_like(tensors["absorbed"].contiguous())
    latent.latent_attention_step(*given.values(), *latent_steps.HOW, out)
    mean = given["latents"][0, :41].float().mean(0).expand_as(out)
    assert torch.allclose(out.float(), mean, atol=0.02)


def test_latent_attention_without_numbers():
    tensors = latent_steps.operands(1, 5, 512, 64, torch.float16, "cpu", 40)
    tensors["query"][0, 2, 3] = float("nan")
    outs = []
    for backend in (latent, reference):
        given = {name: one.clone() for name, one in tensors.items()}
        out = torch.empty(1, 5, 512).half()
        backend.latent_attention_step(*given.values(), *latent_steps.HOW, out)
        outs.append(out)
    for out in outs:
        assert out[0, 2].isnan().all()
        assert out[0, [0, 1, 3, 4]].isfinite().all()
