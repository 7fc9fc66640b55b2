"""Random products of k-bit and of NVFP4 weights, by every kernel that may take them, for tools/fuzz.py."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import torch
from fuzz_checks import Want, Ways, size_of

import kbit
from kbit import nvfp4
from kbit.bench.gpu_timing import environment
from kbit.format.codebook import get_codebook

KERNELS = {
    False: ("dispatch", "stream", "wgmma", "mma", "cublas"),
    True: ("dispatch", "grouped", "resident", "wgmma", "mma"),
}
BY_WEIGHTS = ("wgmma", "mma", "cublas")  # multiply with weights as `dequantize` rounds them
DEDUPS = ("off", "gather", "scatter", "indirect")
MOST_WEIGHTS = 2**25
MOST_PRODUCTS = 2**37
DEALINGS = ("even", "random", "skewed", "one", "few")


@dataclass(frozen=True)
class Problem:
    """A product.

    Attributes:
        seed: of its numbers.
        bits: of a weight; 0: NVFP4.
        dtype: of activations.
        experts: how many; 0 for a single weight.
        n, k, rows: N, K and M, or the rows of all experts.
        dealing: how rows are dealt to experts.
        gated: whether the result is silu(gate) * up.
        bias: whether there is one.
        one_hot: whether activations are.
        symmetric: whether the codebook is.
        stride: from row to row of x, K or more.
    """

    seed: int
    bits: int
    dtype: torch.dtype
    experts: int
    n: int
    k: int
    rows: int
    dealing: str
    gated: bool
    bias: bool
    one_hot: bool
    symmetric: bool
    stride: int


def problem_of(seed: int) -> Problem:
    """The problem of a seed."""
    pick = random.Random(seed)
    experts = pick.choice((0, 0, size_of(pick, 600)))
    bits = pick.choice((2, 3, 4, 5, 0))
    gated = bits > 0 and pick.random() < 0.3
    k = size_of(pick, 16384)
    n = size_of(pick, max(1, min(16384, MOST_WEIGHTS // (k * max(1, experts)))))
    n = max(32, n // 32 * 32) if gated else n
    rows = pick.choice((size_of(pick, 64), size_of(pick, 8192)))
    rows = min(rows, MOST_PRODUCTS // (n * k)) if pick.random() < 0.98 else 0
    return Problem(
        seed,
        bits=bits,
        dtype=pick.choice((torch.float16, torch.bfloat16)),
        experts=experts,
        n=n,
        k=k,
        rows=rows,
        dealing=pick.choice(DEALINGS),
        gated=gated,
        bias=not gated and not experts and pick.random() < 0.3,
        one_hot=bits > 0 and not gated and pick.random() < 0.5,
        symmetric=pick.random() < 0.7,
        stride=k + pick.choice((0, 0, 1, 8, 64)),
    )


def dealt(problem: Problem) -> torch.Tensor:
    """The expert of each row, int64 [rows], on the CPU."""
    experts, rows, made = problem.experts, problem.rows, torch.Generator().manual_seed(problem.seed)
    if problem.dealing == "even":
        return torch.arange(rows) % experts
    if problem.dealing == "one":
        return torch.randint(experts, (1,), generator=made).expand(rows)
    weights = torch.ones(experts)
    if problem.dealing == "skewed":
        weights = 1 / (torch.randperm(experts, generator=made) + 1.0)
    elif problem.dealing == "few":
        weights = (torch.rand(experts, generator=made) < 0.2).float()
        weights[0] += 0.01
    return torch.multinomial(weights, max(1, rows), replacement=True, generator=made)[:rows]


def kbit_ways(problem: Problem, device: torch.device) -> Ways:
    """A k-bit product by dispatch and by every kernel; the weight becomes tiled at the first one."""
    made, eps = torch.Generator(device).manual_seed(problem.seed), torch.finfo(problem.dtype).eps
    codebook = get_codebook("nf", problem.bits)
    codebook[1] *= 1.0 if problem.symmetric else 0.99
    shape = (problem.n, problem.k) if not problem.experts else (problem.experts, problem.n, problem.k)
    w = torch.randn(shape, generator=made, device=device)
    w *= problem.k**-0.5 if problem.gated else 1.0  # products of two sums are to stay below 65504
    q = kbit.quantize(w, problem.bits, codebook=codebook, search=False)
    x = torch.randn(problem.rows, problem.stride, generator=made, device=device).to(problem.dtype)
    x = x[:, : problem.k]
    if problem.one_hot:
        at = torch.randint(problem.k, (problem.rows, 1), generator=made, device=device)
        x.zero_().scatter_(1, at, 1.0)
    bias = None
    if problem.bias:
        bias = torch.randn(problem.n, generator=made, device=device).to(problem.dtype)
    ids = dealt(problem).sort().values.to(device) if problem.experts else None
    sums, of_sums = Want.of(x, kbit.dequantize(q, problem.dtype), ids), problem.k**0.5 * 2.0**-23
    if bias is not None:
        sums.y += bias.double()
    want = tight = sums.within(0.0)
    if not problem.one_hot or bias is not None:
        want = sums.within(eps + of_sums).rounded(problem.dtype)
        tight = sums.within(of_sums).rounded(problem.dtype)
    if bool((q.scale != 1).any()):
        want, tight = (_below_normal(each, x) for each in (want, tight))
    if problem.gated:
        want = tight = want.silu_and_mul(problem.dtype)
    activation = "silu_and_mul" if problem.gated else None
    if ids is None:
        run = partial(kbit.linear, x, q, bias, activation=activation)
    else:
        offsets = torch.nn.functional.pad(ids.bincount(minlength=problem.experts).cumsum(0), (1, 0)).int()
        run = partial(kbit.grouped_linear, x, q, offsets, activation=activation)
    for kernel in KERNELS[problem.experts > 0] if device.type == "cuda" else ("dispatch",):
        with environment({"KBIT_KERNEL": "" if kernel == "dispatch" else kernel}):
            yield kernel, run, (tight if kernel in BY_WEIGHTS else want,)


def _below_normal(want: Want, x: torch.Tensor) -> Want:
    """With room for weights below normal numbers, which are rounded before or after their matrix's factor."""
    info = torch.finfo(x.dtype)
    rounded = x.double().abs().sum(-1, keepdim=True) * info.smallest_normal * info.eps
    return Want(want.y, want.bound + rounded)


def nvfp4_ways(problem: Problem, device: torch.device) -> Ways:
    """An NVFP4 product by every contract and layout; "exact" is the float64 sum, rounded, to the bit."""
    made, dtype, k = torch.Generator(device).manual_seed(problem.seed), problem.dtype, problem.k
    shape = (problem.n, k) if not problem.experts else (problem.experts, problem.n, k)
    w = nvfp4.quantize_nvfp4(torch.randn(shape, generator=made, device=device), search=False)
    x = torch.randn(problem.rows, k, generator=made, device=device).to(dtype)
    a = nvfp4.quantize_nvfp4(x)
    ids = dealt(problem).to(device) if problem.experts else None
    decoded = nvfp4.dequantize_nvfp4(w)
    sums = Want.of(nvfp4.dequantize_nvfp4(a), decoded, ids).within(k**0.5 * 2.0**-23)
    exact = Want(sums.y.float().to(dtype).double(), torch.zeros_like(sums.y))
    for layout in ("nv", "tiled"):
        weight = nvfp4.repack_nvfp4(w, layout)
        for accum in ("exact", "seq16", "tc"):
            if ids is None:
                run = partial(nvfp4.gemm_nvfp4, a, weight, accum, dtype)
            else:
                dedup = DEDUPS[problem.seed % 4]
                run = partial(_nvfp4_experts, x, weight, ids[:, None], dedup, accum)
            want = exact if accum == "exact" else sums.rounded(dtype)
            yield f"nvfp4 {layout} {accum}", run, (want,)
        if ids is None:
            of_x = Want.of(x, decoded, None).within(torch.finfo(dtype).eps + k**0.5 * 2.0**-23)
            yield f"nvfp4 {layout} W4A16", partial(nvfp4.linear_nvfp4, x, weight), (of_x.rounded(dtype),)


def _nvfp4_experts(x: torch.Tensor, weight: nvfp4.NVFP4Tensor, ids: torch.Tensor, *how: str) -> torch.Tensor:
    return nvfp4.moe_gemm_nvfp4(x, weight, ids, *how)[:, 0]


def problem(seed: int, device: torch.device) -> tuple[str, Ways]:
    """The problem of a seed in words, and its ways."""
    made = problem_of(seed)
    return str(made), (kbit_ways if made.bits else nvfp4_ways)(made, device)
