"""Codebooks: the 2^bits reconstruction levels that a code selects from.

A codebook is a float32 tensor of 2^bits levels, strictly ascending, finite, with largest magnitude 1.
`CODEBOOKS` is the registry of named ones; a name travels in a checkpoint's config, a custom codebook
travels as a list of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import NormalDist

import torch

from kbit.format.words import at

SUPPORTED_BITS = (2, 3, 4, 5)
BLOCK_SIZE = 32
# Of NVFP4's codes, by their low three bits; see `kbit.nvfp4.formats.e2m1`.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def check_bits(bits: int, name: str = "bits", or_0: str = "", where: str = "") -> int:
    """Return `bits` if the format supports that width.

    Args:
        bits: code width.
        name: what the caller calls it, for the message.
        or_0: what 0 stands for, for the message, where the caller has looked for it.
        where: name of the layer, for the message.

    Raises:
        ValueError: `bits` is not an integer in 2..5.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in SUPPORTED_BITS:
        known = f"{SUPPORTED_BITS}, or 0 to {or_0}" if or_0 else f"{SUPPORTED_BITS}"
        raise ValueError(f"{name} must be one of {known}, got {bits!r}{at(where)}. Pick one of these.")
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


# Upper halves. Of 2^24 normal numbers by `kbit.fit_codebook`, twice; the last digit is noise.
_BLOCK_OPTIMAL = {
    2: (0.2892, 1.0),
    3: (0.1062, 0.3313, 0.6014, 1.0),
    4: (0.0470, 0.1428, 0.2435, 0.3517, 0.4707, 0.6064, 0.7710, 1.0),
    5: (
        *(0.0211, 0.0640, 0.1080, 0.1532, 0.1992, 0.2463, 0.2950, 0.3458),
        *(0.3993, 0.4561, 0.5170, 0.5834, 0.6567, 0.7382, 0.8293, 1.0),
    ),
}


def block_optimal_float(bits: int) -> torch.Tensor:
    """The codebook with the least squared error on normal weights, with block scales as search finds them.

    Args:
        bits: code width, 2 to 5.

    Returns:
        float32 [2^bits] on the CPU, ascending, symmetric around 0, largest magnitude 1.

    Raises:
        ValueError: `bits` is not in 2..5.

    The method is that of Blumenberg et al., "BOF4" (2025): Lloyd's algorithm on normal numbers in blocks. The
    levels are not theirs, because blocks, and how their scales are chosen and stored, are this format's.

    >>> block_optimal_float(3)[4:]
    tensor([0.1062, 0.3313, 0.6014, 1.0000])
    """
    upper = torch.tensor(_BLOCK_OPTIMAL[check_bits(bits)], dtype=torch.float32, device="cpu")
    return torch.cat([-upper.flip(0), upper])


CODEBOOKS: dict[str, Callable[[int], torch.Tensor]] = {"nf": normal_float, "bof": block_optimal_float}


def validate_codebook(codebook: torch.Tensor, bits: int, where: str = "") -> None:
    """Check that `codebook` is a legal codebook of width `bits`; `where` is the layer, for messages.

    Raises:
        TypeError: not a float32 tensor.
        ValueError: wrong length, not finite, not strictly ascending, or largest magnitude not 1.
    """
    count = 2 ** check_bits(bits, where=where)
    if not isinstance(codebook, torch.Tensor) or codebook.dtype != torch.float32:
        got = codebook.dtype if isinstance(codebook, torch.Tensor) else type(codebook).__name__
        raise TypeError(f"codebook must be a float32 tensor, got {got}{at(where)}. Convert it with .float().")
    if codebook.dim() != 1 or codebook.numel() != count:
        raise ValueError(
            f"a {bits}-bit codebook has {count} levels, got shape {tuple(codebook.shape)}{at(where)}. "
            f"Pass one level per code, or another bits."
        )
    levels = codebook.tolist()
    if not all(map(math.isfinite, levels)):
        raise ValueError(f"codebook must be finite, got {levels}{at(where)}. Remove NaN and Inf.")
    if not all(below < level for below, level in pairwise(levels)):
        raise ValueError(
            f"codebook must be strictly ascending, got {levels}{at(where)}. Sort it, each level once."
        )
    largest = max(map(abs, levels))
    if largest != 1.0:
        raise ValueError(
            f"codebook must have largest magnitude 1, got {largest}{at(where)}. Divide it by that: scales "
            f"carry it."
        )


def get_codebook(codebook: str | Sequence[float] | torch.Tensor, bits: int, where: str = "") -> torch.Tensor:
    """Resolve a codebook given by name, as numbers or as a tensor.

    Args:
        codebook: a name in `CODEBOOKS` ("nf", "bof"), 2^bits numbers, or a floating-point tensor of them.
        bits: code width, 2 to 5.
        where: name of the layer, for messages.

    Returns:
        float32 [2^bits], validated; on the device of the tensor given, else on the CPU.

    Raises:
        TypeError, ValueError: see `validate_codebook`; also an unknown name.
    """
    check_bits(bits, where=where)
    if isinstance(codebook, str):
        if codebook not in CODEBOOKS:
            raise ValueError(
                f"unknown codebook {codebook!r}; known: {', '.join(sorted(CODEBOOKS))}{at(where)}. Give "
                f"another by its {2**bits} levels: KbitConfig(bits={bits}, codebook=[...])."
            )
        return CODEBOOKS[codebook](bits)
    if isinstance(codebook, torch.Tensor) and (
        codebook.layout is not torch.strided or codebook.is_nested or codebook.is_meta
    ):
        raise TypeError(
            f"codebook must be dense and hold its {2**bits} levels, got {codebook.layout} on "
            f"{codebook.device}{at(where)}. Pass them as numbers."
        )
    levels = codebook.detach() if isinstance(codebook, torch.Tensor) else _from_numbers(codebook, where)
    if levels.is_floating_point():
        levels = levels.to(torch.float32, copy=True)  # the caller may go on changing theirs
    validate_codebook(levels, bits, where)
    return levels


def _from_numbers(levels: Sequence[float], where: str) -> torch.Tensor:
    try:
        return torch.tensor(levels, dtype=torch.float32, device="cpu")
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"codebook must be a name of {sorted(CODEBOOKS)}, 2^bits numbers or a tensor of them, got "
            f"{str(levels)[:80]}{at(where)}: {error}. Give floats."
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
