"""rotary.cu and cache_append.cu, run on the CPU, give what the reference gives and touch nothing else."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import caches, position

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
def test_heads(heads, columns, turned, dtype):
    for batch, tokens, angles in ((1, 1, 1), (2, 3, 1), (2, 3, 2)):
        given = operands(batch, heads, tokens, columns, turned, dtype, angles)
        outs = [guarded(torch.full((batch, tokens, of, columns), float("nan"), dtype=dtype)) for of in heads]
        position.rotary(*given, *outs)
        want = [torch.empty_like(out) for out in outs]
        reference.rotary(*given, *want)
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
