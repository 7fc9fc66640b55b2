"""Codebooks: the 2^bits reconstruction levels that a code selects from.

A codebook is a float32 tensor of 2^bits levels, strictly ascending, finite, with largest magnitude 1.
`CODEBOOKS` is the registry of named ones; a name travels in a checkpoint's config, a custom codebook
travels as a list of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import torch

SUPPORTED_BITS = (2, 3, 4, 5)
BLOCK_SIZE = 32
# Of NVFP4's codes, by their low three bits; see `kbit.nvfp4.formats.e2m1`.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check_bits(bits: int, name: str = "bits", or_0: str = "") -> int:
    """Return `bits` if the format supports that width.

    Args:
        bits: code width.
        name: what the caller calls it, for the message.
        or_0: what 0 stands for, for the message, where the caller has looked for it.

    Raises:
        ValueError: `bits` is not an integer in 2..5.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in SUPPORTED_BITS:
        known = f"{SUPPORTED_BITS}, or 0 to {or_0}" if or_0 else f"{SUPPORTED_BITS}"
        raise ValueError(f"{name} must be one of {known}, got {bits!r}. Pick a whole number from 2 to 5.")
    return bits


def _normal_float_levels(bits: int) -> list[float]:
    count = 2**bits
    # The upper half, mirrored, so that the levels are symmetric exactly.
    upper = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count // 2, count)]
    positive = [level / upper[-1] for level in upper]
    return [-level for level in reversed(positive)] + positive


# Not tensors: what makes those may be a device context, a tracer or torch.inference_mode.
_NORMAL_FLOAT = {bits: _normal_float_levels(bits) for bits in SUPPORTED_BITS}


def normal_float(bits: int) -> torch.Tensor:
    """The normal-float codebook: level i is ppf_N(0,1)((i + 0.5) / 2^bits), divided by the largest one.

    Args:
        bits: code width, 2 to 5.

    Returns:
        float32 [2^bits] on the CPU, ascending, symmetric around 0, largest magnitude 1.

    Raises:
        ValueError: `bits` is not in 2..5.

    The levels are the medians of 2^bits equally likely bins of a normal distribution, after
    Dettmers et al., "QLoRA" (2023), without its asymmetric zero.

    >>> normal_float(2).tolist()
    [-1.0, -0.27699354..., 0.27699354..., 1.0]
    """
    return torch.tensor(_NORMAL_FLOAT[check_bits(bits)], dtype=torch.float32, device="cpu")


CODEBOOKS: dict[str, Callable[[int], torch.Tensor]] = {"nf": normal_float}


def validate_codebook(codebook: torch.Tensor, bits: int) -> None:
    """Check that `codebook` is a legal codebook of width `bits`.

    Raises:
        TypeError: not a float32 tensor.
        ValueError: wrong length, not finite, not strictly ascending, or largest magnitude not 1.
    """
    levels = 2 ** check_bits(bits)
    if not isinstance(codebook, torch.Tensor) or codebook.dtype != torch.float32:
        got = codebook.dtype if isinstance(codebook, torch.Tensor) else type(codebook).__name__
        raise TypeError(f"codebook must be a float32 tensor, got {got}. Convert it with .float().")
    if codebook.dim() != 1 or codebook.numel() != levels:
        raise ValueError(
            f"a {bits}-bit codebook has {levels} levels, got shape {tuple(codebook.shape)}. "
            f"Pass one level per code, or another bits."
        )
    if not bool(torch.isfinite(codebook).all()):
        raise ValueError(f"codebook must be finite, got {codebook.tolist()}. Remove NaN and Inf.")
    if not bool((codebook[1:] > codebook[:-1]).all()):
        raise ValueError(
            f"codebook must be strictly ascending, got {codebook.tolist()}. Sort it, each level once."
        )
    largest = float(codebook.abs().max())
    if largest != 1.0:
        raise ValueError(
            f"codebook must have largest magnitude 1, got {largest}. Divide it by that: scales carry it."
        )


def get_codebook(codebook: str | Sequence[float] | torch.Tensor, bits: int) -> torch.Tensor:
    """Resolve a codebook given by name, as numbers or as a tensor.

    Args:
        codebook: a name in `CODEBOOKS` ("nf"), 2^bits numbers, or a floating-point tensor of them.
        bits: code width, 2 to 5.

    Returns:
        float32 [2^bits], validated; on the device of the tensor given, else on the CPU.

    Raises:
        TypeError, ValueError: see `validate_codebook`; also an unknown name.
    """
    check_bits(bits)
    if isinstance(codebook, str):
        if codebook not in CODEBOOKS:
            raise ValueError(
                f"unknown codebook {codebook!r}; known: {', '.join(sorted(CODEBOOKS))}. Give another "
                f"by its {2**bits} levels: KbitConfig(bits={bits}, codebook=[...])."
            )
        return CODEBOOKS[codebook](bits)
    if isinstance(codebook, torch.Tensor) and (
        codebook.layout is not torch.strided or codebook.is_nested or codebook.is_meta
    ):
        raise TypeError(
            f"codebook must be dense and hold its {2**bits} levels, got {codebook.layout} on "
            f"{codebook.device}. Pass them as numbers."
        )
    levels = codebook.detach() if isinstance(codebook, torch.Tensor) else _from_numbers(codebook)
    if levels.is_floating_point():
        levels = levels.float()
    validate_codebook(levels, bits)
    return levels


def _from_numbers(levels: Sequence[float]) -> torch.Tensor:
    try:
        return torch.tensor(levels, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"codebook must be a name of {sorted(CODEBOOKS)}, 2^bits numbers or a tensor of them, got "
            f"{str(levels)[:80]} ({error})."
        ) from None


def bits_of(codebook: torch.Tensor) -> int:
    """Code width of a codebook [2^bits]."""
    return codebook.shape[0].bit_length() - 1


def midpoints(codebook: torch.Tensor) -> torch.Tensor:
    """The decision thresholds between neighbouring levels.

    Each is the largest float32 not above the exact midpoint, so that for every float32 v the number of
    thresholds below v is the code of the level nearest to v, ties to the lower index, without error.

    Args:
        codebook: float32 [2^bits], ascending.

    Returns:
        float32 [2^bits - 1], ascending, on the codebook's device.
    """
    exact = codebook.double()
    middle = (exact[1:] + exact[:-1]) / 2
    rounded = middle.float()
    below = torch.nextafter(rounded, torch.full_like(rounded, -math.inf))
    return torch.where(rounded.double() > middle, below, rounded)


def nearest_code(values: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """The code of the level nearest to each value, ties to the lower index.

    Args:
        values: float32, any shape.
        codebook: float32 [2^bits].

    Returns:
        uint8, the shape of `values`.
    """
    # right=False counts thresholds strictly below the value.
    return torch.bucketize(values, midpoints(codebook), right=False).to(torch.uint8)
