"""Which kernel takes rows sorted by expert: legality and preference, as `preference` for one weight."""

from __future__ import annotations

import functools

import torch

from kbit.backends import environment
from kbit.backends.cuda import grouped, mma, operands, resident, wgmma
from kbit.backends.cuda.preference import forced_kernel
from kbit.backends.cuda.weight_shape import WeightShape

# Rows of an expert, evenly dealt, and bytes of a block's weights up to which resident.cu is fastest. On an
# H200, experts of 512 x 2048 and 2048 x 512, 4 bits: 8 of them (34 KB a block) by a row each take 3.2 us,
# by 16 rows 4.4 and 3.9, grouped 6.0 and 5.6; 16 of them (70 KB) by 16 rows 6.7 and 7.8, grouped 7.3 and 7.6;
# 32 of them by 4 rows took 11.5, grouped 9.7. An expert with more rows than others waits for its own blocks:
# dealt by Zipf's law, 64 rows on 8 experts took 8.2 and 7.2 us, grouped 7.5 and 6.9.
_RESIDENT_ROWS, _RESIDENT_BYTES = 16, 72 * 1024
# Off Hopper, rows of an expert up to which grouped.cu, which takes 16 at a time, is faster than mma.cu. On an
# H200, 128 experts of 1536 x 2048 by 64 rows take 325 us and 323, by 128 rows 603 and 483.
_GROUPED_ROWS = 96


def choose(m: int, dtype: torch.dtype, experts: int, weight: WeightShape) -> str:
    """The kernel for m rows dealt to experts in some way, which is not known here.

    "cublas", one expert after the other, waits for the device and is only taken where no kernel may, such as
    for float32, and if forced.

    Raises:
        ValueError: KBIT_KERNEL names no kernel, or one that may not take this problem.
    """
    refusals = _refusals(dtype, experts, weight)
    forced = forced_kernel(environment.kernel(), refusals)
    if forced:
        return forced
    held = resident.plan(m, experts, weight) if refusals["resident"] is None else None
    if held is not None and m <= _RESIDENT_ROWS * experts and held.weight_bytes <= _RESIDENT_BYTES:
        return "resident"
    few = m <= grouped.TOKENS[0] * experts
    if refusals["grouped"] is None and (
        few or (refusals["wgmma"] is not None and m <= _GROUPED_ROWS * experts)
    ):
        return "grouped"
    return next(kernel for kernel in ("wgmma", "mma", "cublas") if refusals[kernel] is None)


def reasons(m: int, dtype: torch.dtype, experts: int, weight: WeightShape) -> dict[str, str]:
    """Every kernel, with words on whether it is taken, could be, or may not, and the taken one's launch.

    Raises:
        ValueError: see `choose`.
    """
    chosen = choose(m, dtype, experts, weight)
    refusals = _refusals(dtype, experts, weight)
    words = {kernel: refusal or "could take it" for kernel, refusal in refusals.items()}
    words[chosen] = "taken by estimate"
    if chosen == "grouped" and (plan := grouped.plan(m, experts, weight)) is not None:
        warps = f"{plan.config.warps} warps, {plan.span} of them to a row"
        words[chosen] += f": {plan.grid} blocks of {warps}, {plan.most} rows of an expert at once"
    elif chosen == "resident" and (held := resident.plan(m, experts, weight)) is not None:
        words[chosen] += f": {held.grid} blocks of {held.config.warps} warps, {held.span} of them to a row"
    elif chosen == "mma":
        config = mma.grouped_plan(m, experts, weight).config
        words[chosen] += f": blocks of {config.rows} rows by {config.tokens} tokens"
    elif chosen == "wgmma":
        launch = wgmma.grouped_plan(m, experts, weight)
        tiling = launch.tiling
        words[chosen] += f": {launch.grid} blocks of {tiling.rows} rows by {tiling.tokens} tokens"
    return words


@functools.lru_cache(maxsize=4096)
def _refusals(dtype: torch.dtype, experts: int, weight: WeightShape) -> dict[str, str | None]:
    """Why each kernel may not take a problem, or None."""
    of_both = operands.grouped_refusal(dtype, weight.out_features, weight.gated, experts)
    return {
        "resident": resident.refusal(dtype, experts, weight),
        "grouped": grouped.refusal(dtype, experts, weight),
        "wgmma": wgmma.arch_refusal(weight.device.arch) or of_both,
        "mma": of_both,
        "cublas": None,
    }
