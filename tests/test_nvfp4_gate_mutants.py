"""Wrong kernels that the gate has to refuse: each keeps every shape, and most of them nearly every byte."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from kbit.nvfp4 import gate, model, moe, reference
from kbit.nvfp4.folds import Normed, rmsnorm
from kbit.nvfp4.kernels import kernels_for
from kbit.nvfp4.moe import ExpertInput
from kbit.nvfp4.quantize import quantize_nvfp4
from kbit.nvfp4.record import counting

# Their packages export functions of these names.
NORMS = importlib.import_module("kbit.nvfp4.reference.folds")
PRODUCTS = importlib.import_module("kbit.nvfp4.reference.gemm")
STRIDE = 2048  # columns of one pass of a norm's 256 threads
honest_sum = NORMS.sum_of_squares


def failures(toggle: str, tokens: int = 1, accum: str = "exact") -> dict[str, str | None]:
    return {verdict.lever: verdict.failure for verdict in gate.run_gate(toggle, [tokens], accum)}


def reversed_warps(values: torch.Tensor) -> torch.Tensor:
    """`sum_of_squares` with the 8 sums of warps from the last to the first."""
    padded = F.pad(values, (0, -values.shape[1] % STRIDE))
    return honest_sum(padded.unflatten(1, (-1, 8, STRIDE // 8)).flip(2).flatten(1))


def reversed_strides(values: torch.Tensor) -> torch.Tensor:
    """`sum_of_squares` with the strides from the last to the first."""
    padded = F.pad(values, (0, -values.shape[1] % STRIDE))
    return honest_sum(padded.unflatten(1, (-1, STRIDE)).flip(1).flatten(1))


TREES = [reversed_warps, reversed_strides]


@pytest.mark.parametrize("tree", TREES)
def test_another_reduction_tree_in_the_fold(tree, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.rmsnorm_quantize

    def folded(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(NORMS, "sum_of_squares", tree)
            return honest(*arguments)

    monkeypatch.setattr(reference, "rmsnorm_quantize", folded)
    for failure in failures("fold").values():
        assert failure is not None
        assert "off and on differ first in wide.norm" in failure


@pytest.mark.parametrize("tree", TREES)
def test_another_reduction_tree_in_norm_and_fold(tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NORMS, "sum_of_squares", tree)
    for failure in failures("fold").values():
        assert failure is not None
        assert "differs from the stored reference" in failure
        assert failure.startswith("wide.norm")


def test_rows_that_all_get_the_factor_of_the_first_when_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = moe.gather_rows

    def first_factor(t, rows):
        gathered = honest(t, rows)
        if gathered.row_scale is not None:
            gathered.row_scale.copy_(t.row_scale[:1].expand(len(rows)))
        return gathered

    monkeypatch.setattr(moe, "gather_rows", first_factor)
    found = failures("dedup", 8)
    assert {lever for lever, failure in found.items() if failure} == {"dedup=gather row_scale"}
    assert "layer0.gathered" in str(found["dedup=gather row_scale"])


def test_rows_that_all_get_the_factor_of_the_first_in_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.moe_gemm

    def first_factor(a_codes, a_scales, rows, bounds, w_codes, w_scales, scale, row_scale, *how):
        if rows is not None and row_scale is not None:
            row_scale = row_scale[:1].expand(len(row_scale))
        return honest(a_codes, a_scales, rows, bounds, w_codes, w_scales, scale, row_scale, *how)

    monkeypatch.setattr(reference, "moe_gemm", first_factor)
    found = failures("dedup", 8)
    assert {lever for lever, failure in found.items() if failure} == {"dedup=indirect row_scale"}
    assert "layer0.gate_up.gemm" in str(found["dedup=indirect row_scale"])


def two_passes_of_the_caller(patch: pytest.MonkeyPatch) -> None:
    def normed(x, weight, eps, residual):
        norm, h = rmsnorm(x, weight, eps, residual)
        return Normed(quantize_nvfp4(norm), norm, h)

    patch.setattr(model, "rmsnorm_quantize_nvfp4", normed)
    patch.setattr(model, "silu_mul_quantize_nvfp4", lambda x: quantize_nvfp4(model.silu_mul(x)))


def two_passes_of_the_kernels(patch: pytest.MonkeyPatch) -> None:
    def normed(x, weight, eps, residual, write_norm, *how):
        norm, h = reference.rmsnorm(x, weight, eps, residual)
        return *reference.quantize(norm, *how), norm, h

    patch.setattr(reference, "rmsnorm_quantize", normed)
    patch.setattr(
        reference, "silu_mul_quantize", lambda x, *how: reference.quantize(reference.silu_mul(x), *how)
    )


@pytest.mark.parametrize("replace", [two_passes_of_the_caller, two_passes_of_the_kernels])
def test_folds_that_are_two_passes(replace, monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch)
    for lever, failure in failures("fold").items():
        assert failure is not None
        assert failure.startswith(f"{lever} did something else: activations 16, ")


def test_dedup_that_quantizes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = moe.quantize_for_experts

    def all_rows(x, routing, dedup="off", **how):
        a = honest(x, routing, "off", **how)
        tokens, pairs = len(x), len(routing.source)
        return a if dedup == "off" else ExpertInput(a.tensor, None, tokens, pairs)

    monkeypatch.setattr(model, "quantize_for_experts", all_rows)
    for failure in failures("dedup").values():
        assert failure is not None
        assert "did not fire" in failure


def test_a_scatter_that_quantizes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def scattered(x, slots, *how):
        source = slots.flatten().argsort() // slots.shape[1]
        return reference.quantize(x[source], *how)

    monkeypatch.setattr(reference, "quantize_scatter", scattered)
    found = failures("dedup")
    assert {lever for lever, failure in found.items() if failure} == {"dedup=scatter"}
    assert "did something else: rows quantized 500, expected 340" in str(found["dedup=scatter"])


def test_a_gather_that_quantizes_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = moe.quantize_nvfp4

    def every_choice(x, *how):
        t = honest(x.repeat(2, 1), *how)
        parts = (None if part is None else part[: len(x)] for part in (*t.nv(), t.row_scale))
        codes, scales, row_scale = parts
        return type(t)(codes, scales, t.global_scale, tuple(x.shape), row_scale=row_scale)

    monkeypatch.setattr(moe, "quantize_nvfp4", every_choice)
    found = failures("dedup")
    for lever in ("dedup=gather", "dedup=indirect row_scale"):
        assert "did something else: rows quantized" in str(found[lever])


def in_chains(honest):
    """A sum of products that starts anew every 256 columns, and adds what it had in float32."""

    def chained(a: torch.Tensor, w: torch.Tensor, *chunk: int) -> torch.Tensor:
        parts = [
            honest(a[:, start : start + 256], w[:, start : start + 256], *chunk)
            for start in range(0, a.shape[1], 256)
        ]
        return sum(parts[1:], parts[0])

    return chained


@pytest.mark.parametrize(("accum", "name"), [("exact", "_exact"), ("seq16", "_by_sub_blocks")])
def test_sums_that_start_anew_every_256_columns(
    accum: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PRODUCTS, name, in_chains(getattr(PRODUCTS, name)))
    for failure in failures("dedup", 1, accum).values():
        assert failure is not None
        assert "differs from the stored reference" in failure
        assert failure.startswith("wide.layer0.gate_up.gemm")


def test_a_tile_that_rounds_every_256_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = PRODUCTS._exact
    chained = in_chains(honest)
    monkeypatch.setattr(
        PRODUCTS, "_exact", lambda a, w, chunk: (chained if chunk == 256 else honest)(a, w, chunk)
    )
    found = failures("tile")
    assert {lever for lever, failure in found.items() if failure} == {"tile=k256"}
    assert "differ first in wide.layer0.gate_up.gemm" in str(found["tile=k256"])


def test_counting_leaves_the_kernels_as_they_were() -> None:
    counts: Counter[str] = Counter()
    kernels = kernels_for(torch.zeros(1))
    assert isinstance(kernels, ModuleType)
    before = dict(vars(kernels))
    with counting(kernels, counts):
        quantize_nvfp4(torch.ones(3, 16))
    with pytest.raises(ValueError, match="x must be"), counting(kernels, counts):
        quantize_nvfp4(torch.ones(16))
    assert vars(kernels) == before
    assert counts == {"rows quantized": 3}
