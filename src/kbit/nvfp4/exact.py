"""Operations that PyTorch lacks, or does not define to the bit: fma, rounding of integers, exp.

Everything is elementwise and made of IEEE operations, so every device gives the same bits.
"""

from __future__ import annotations

import torch

# exp(x) = 2^n * exp(r), n = round(x * LOG2E), r = x - n * (LN2_HIGH + LN2_LOW). These are the constants of
# expf in Cephes (S. Moshier): LN2_HIGH has 9 bits, so that n * LN2_HIGH is exact; the polynomial is a minimax
# one for (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2. As float32 hexadecimal, highest power first.
LOG2E = float.fromhex("0x1.715476p+0")
LN2_HIGH = float.fromhex("0x1.63p-1")
LN2_LOW = float.fromhex("-0x1.bd0106p-13")
COEFFICIENTS = tuple(
    float.fromhex(text)
    for text in (
        "0x1.a0d2cep-13",
        "0x1.6e879cp-10",
        "0x1.111210p-7",
        "0x1.555382p-5",
        "0x1.555554p-3",
        "0x1.000000p-1",
    )
)
# Beyond it exp is 0 or infinite in float32.
LIMIT = 104.0


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """float32 a * b + c, rounded once.

    The product of two float32 is exact in float64. The sum is not, so it is rounded to odd there: then
    rounding to float32, which has 29 bits fewer, gives what one rounding of the exact value would (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).

    Args:
        a, b, c: float32, broadcast together.

    Returns:
        float32.
    """
    product = a.double() * b.double()
    addend = c.double() if isinstance(c, torch.Tensor) else torch.full_like(product, c)
    total = product + addend
    # Knuth's two-sum: what `total` lost.
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    return _round_to_odd(total, lost).float()


def _round_to_odd(rounded: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """The float64 neighbour of rounded + lost that is odd; `rounded` itself where it is exact or odd.

    Args:
        rounded: float64, the nearest one to the exact value.
        lost: float64 with the sign of what is missing; NaN, as infinities give it, counts as nothing.
    """
    bits = rounded.view(torch.int64)
    # Magnitudes grow with the bit pattern, whatever the sign.
    step = torch.where((lost > 0) == (rounded > 0), 1, -1)
    inexact = (lost > 0) | (lost < 0)
    return torch.where(inexact & (bits & 1 == 0), bits + step, bits).view(torch.float64)


def integer_to_float32(total: torch.Tensor) -> torch.Tensor:
    """The nearest float32 of an int64, ties to even; |total| < 2^63 - 2^10."""
    rounded = total.double()
    lost = total - rounded.long()
    return _round_to_odd(rounded, lost.double()).float()


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 2^exponent for int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """exp of float32 with defined bits; within 1.1 ulp of the true value.

    x = min(max(x, -LIMIT), LIMIT); n = rint(x * LOG2E); r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x));
    p = COEFFICIENTS[0], then p = fma(p, r, next) for the others; p = fma(p, r * r, r) + 1;
    with h = floor(n / 2): (p * 2^h) * 2^(n - h), so that results overflow to infinity and underflow
    gradually. NaN stays NaN.

    Args:
        x: float32.

    Returns:
        float32, the same shape.
    """
    invalid = torch.isnan(x)
    x = torch.where(invalid, 0.0, x).clamp(-LIMIT, LIMIT)
    n = torch.round(x * LOG2E)
    high, low = (torch.full_like(x, -value) for value in (LN2_HIGH, LN2_LOW))
    r = fma(n, low, fma(n, high, x))
    p = torch.full_like(x, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        p = fma(p, r, coefficient)
    p = fma(p, r * r, r) + 1.0
    exponent = n.to(torch.int32)
    half = exponent >> 1
    result = (p * power_of_two(half)) * power_of_two(exponent - half)
    return torch.where(invalid, torch.nan, result)
