"""rms_norm.cu and norm_logits.cu, run on the CPU, give what they should, and touch nothing beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import driver, norm, norm_logits, router_logits

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_norm_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 128, 256, 264, 576, 2048, 8192, 8200, 16384])
def test_rows(columns, dtype):
    for rows, plus_one, round_first in itertools.product((1, 5), (False, True), (False, True)):
        x = guarded(torch.randn(rows, columns).to(dtype))
        weight = guarded(torch.randn(columns).to(dtype))
        out = guarded(torch.full((rows, columns), float("nan"), dtype=dtype))
        assert norm.takes(x, weight)
        norm.rms_norm(x, weight, 1e-6, plus_one, round_first, out)
        assert untouched(out)
        want = torch.empty_like(out)
        reference.rms_norm(x, weight, 1e-6, plus_one, round_first, want)
        # Sums have another order, which a rounding to 16 bits hardly ever shows.
        torch.testing.assert_close(out, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-7)
        assert (out != want).sum() <= 2 + out.numel() // 500


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("columns", [8, 264, 2048, 16384])
def test_sums(columns, dtype):
    x, added = (guarded(torch.randn(5, columns).to(dtype)) for _ in range(2))
    weight = guarded(torch.randn(columns).to(dtype))
    total, out = (guarded(torch.full((5, columns), float("nan"), dtype=dtype)) for _ in range(2))
    norm.rms_norm(x, weight, 1e-6, True, False, out, added, total)
    assert untouched(out)
    assert untouched(total)
    want = torch.empty_like(out)
    norm.rms_norm(x + added, weight, 1e-6, True, False, want)
    assert torch.equal(total, x + added)
    assert torch.equal(out, want)


@pytest.fixture(params=["one", "several"])
def rows_of_a_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "several":
        monkeypatch.setattr(norm, "_MANY_LANES", 2 * driver.WARP)  # what a single short row has not
    norm._prepared.cache_clear()
    yield
    norm._prepared.cache_clear()


@pytest.mark.usefixtures("rows_of_a_thread")
@pytest.mark.parametrize("columns", [8, 128, 256, 2048])
def test_rows_in_their_places(columns):
    """Each gives what it gives alone, by a thread that has no other row."""
    weight = torch.randn(columns).bfloat16()
    memory = guarded(torch.randn(2, 23, 5, 2 * columns).bfloat16())
    heads = memory[..., columns:]
    for x in (
        memory.reshape(-1, columns),
        heads,
        heads[:, :, 1],
        heads[:1, :, 2:4],
        heads[1, :1],
        heads[:, 1:2].transpose(0, 1),
        memory[0, 0, :1, :columns].expand(37, columns),
    ):
        out = guarded(torch.full(x.shape, float("nan"), dtype=x.dtype))
        assert norm.takes(x, weight)
        norm.rms_norm(x, weight, 1e-6, False, True, out)
        assert untouched(out)
        alone = torch.empty(1, columns, dtype=x.dtype)
        for row, have in zip(x.reshape(-1, columns), out.view(-1, columns), strict=True):
            norm.rms_norm(row[None], weight, 1e-6, False, True, alone)
            assert torch.equal(have[None], alone)


def test_sums_of_rows_in_their_places():
    x = torch.randn(3, 4, 2, 512).bfloat16()[..., :256]
    added, weight = torch.randn(3, 4, 2, 256).bfloat16(), torch.randn(256).bfloat16()
    total, out, want = (torch.empty_like(added) for _ in range(3))
    norm.rms_norm(x, weight, 1e-6, True, False, out, added, total)
    norm.rms_norm(x + added, weight, 1e-6, True, False, want)
    assert torch.equal(total, x + added)
    assert torch.equal(out, want)


def test_one_row_is_one_of_many():
    x, weight = torch.randn(9, 576).bfloat16(), torch.randn(576).bfloat16()
    out, alone = torch.empty_like(x), torch.empty(1, 576, dtype=torch.bfloat16)
    norm.rms_norm(x, weight, 1e-6, False, True, out)
    for row in range(9):
        norm.rms_norm(x[row : row + 1], weight, 1e-6, False, True, alone)
        assert torch.equal(alone, out[row : row + 1])


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(2, 12).half(), torch.zeros(12).half()),
        (torch.zeros(2, 8), torch.zeros(8)),
        (torch.zeros(2, 16392).half(), torch.zeros(16392).half()),
        (torch.zeros(2, 3, 5, 7, 8).half()[:, :2, :4, :6], torch.zeros(9).half()[1:]),
        (torch.zeros(2, 8).half(), torch.zeros(9).half()[1:]),
    ],
)
def test_what_it_does_not_take_the_reference_computes(x, weight, monkeypatch):
    assert not norm.takes(x, weight)
    monkeypatch.setattr(norm, "_prepared", None)
    out = torch.empty(x.shape, dtype=x.dtype)
    norm.rms_norm(x.fill_(1), weight.fill_(2), 0.0, False, True, out)
    assert torch.equal(out, torch.full_like(out, 2))


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 16).half()[:, ::2],
        torch.randn(2, 12).half()[:, 4:],
        torch.randn(2, 3, 5, 7, 8).half()[:, :2, :4, :6],
    ],
)
def test_rows_of_other_strides_are_copied_first(x, monkeypatch):
    monkeypatch.setattr(norm, "reference", None)
    weight = torch.randn(8).half()
    assert not norm.takes(x, weight)
    out, want = (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
    norm.rms_norm(x, weight, 1e-6, False, True, out)
    norm.rms_norm(x.clone(memory_format=torch.contiguous_format), weight, 1e-6, False, True, want)
    assert torch.equal(out, want)


def test_nor_does_it_take_a_sum_with_what_is_elsewhere(monkeypatch):
    monkeypatch.setattr(norm, "_prepared", None)
    x, weight = torch.ones(2, 8).half(), torch.full((8,), 2.0).half()
    total, out = torch.empty_like(x), torch.empty_like(x)
    norm.rms_norm(x, weight, 0.0, False, True, out, torch.ones(3, 9).half().flatten()[1:17].view(2, 8), total)
    assert torch.equal(total, torch.full_like(x, 2))
    assert torch.equal(out, torch.full_like(x, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "columns"), [(1, 520), (5, 2048), (6, 2056), (19, 4104), (3, 8192), (70, 520)]
)
def test_logits_with_the_norm_in_front(experts, columns, dtype):
    kinds = ((dtype, dtype), (torch.float32, dtype), (torch.float32, torch.float32))
    for tokens, (out, held), more in itertools.product((1, 3, 16), kinds, (False, True)):
        x, added = (guarded(torch.randn(tokens, columns).to(dtype)) for _ in range(2))
        weight = guarded(torch.randn(columns).to(dtype))
        router = guarded(torch.randn(experts, columns).to(held))
        last = guarded(torch.randn(1, columns).to(held)) if more else None
        how = (1e-6, more, out != dtype)
        made = [guarded(torch.full((tokens, columns), float("nan"), dtype=dtype)) for _ in range(2)]
        made.append(guarded(torch.full((tokens, experts + more), float("nan"), dtype=out)))
        assert norm_logits.takes(x, added, weight, router, last)
        norm_logits.add_rms_norm_logits(x, added, weight, *how, router, last, *made)
        total, normed = torch.empty_like(x), torch.empty_like(x)
        norm.rms_norm(x, weight, *how, normed, added, total)
        want = total, normed, router_logits.moe_logits(normed, router, out, last)
        assert all(torch.equal(one, other) for one, other in zip(made, want, strict=True))
        assert all(map(untouched, made))


def test_rows_that_logits_with_the_norm_in_front_do_not_take():
    x, weight, router = torch.ones(3, 1024).half(), torch.ones(1024).half(), torch.ones(4, 1024).half()

    def takes(x, weight, router, last=None):
        return norm_logits.takes(x, x, weight, router, last)

    assert takes(x, weight, router)
    assert takes(x[None], weight, router, router[:1])
    assert takes(torch.ones(16, 1024).half(), weight, router)
    assert not takes(torch.ones(17, 1024).half(), weight, router)
    assert not takes(x[:0], weight, router)
    assert not takes(x, weight, router[:0])
    assert takes(x, weight, torch.ones(426, 1024).half())
    assert not takes(x, weight, torch.ones(427, 1024).half())
    for columns in (512, 1020):
        assert not takes(*(one[..., :columns].contiguous() for one in (x, weight, router)))
    assert not takes(*(one[..., :1016] for one in (x, weight, router)))
    assert takes(x, weight, router.float(), router[:1].float())
    assert not takes(x, weight, router.float(), router[:1])
    long, wide = torch.ones(16, 8192).half(), torch.ones(28, 8192)
    assert takes(long, long[0], wide[:27])
    assert not takes(long, long[0], wide)  # whose blocks share weights
    assert not takes(*(torch.ones(rows, 8200).half() for rows in (1, 1, 4)))
    assert not takes(x, weight, router.bfloat16())
    assert not takes(x, weight.float(), router)
    assert not takes(x.float(), weight.float(), router.float())
    assert not takes(x, weight, torch.ones(4 * 1024 + 1).half()[1:].view(4, 1024))
    assert not takes(x, weight, router, torch.ones(1025).half()[None, 1:])
    wide = torch.ones(1, 9736).half()
    assert not takes(wide, wide[0], wide)
