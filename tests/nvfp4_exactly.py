"""NVFP4 in exact rational arithmetic, one element at a time, to compare the reference with."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

MAGNITUDES = [Fraction(m) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
MIDPOINTS = [Fraction(m) for m in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)]
INFINITY = float("inf")


def round32(value: Fraction) -> float:
    """The nearest float32 of a rational number, ties to even."""
    if value == 0:
        return 0.0
    magnitude, sign = abs(value), -1.0 if value < 0 else 1.0
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / step) * step  # Fraction rounds halves to even
    return sign * (float(rounded) if rounded < Fraction(2) ** 128 else INFINITY)


def fma(a: float, b: float, c: float) -> float:
    if INFINITY in (abs(a), abs(b), abs(c)):
        return a * b + c
    return round32(Fraction(a) * Fraction(b) + Fraction(c))


def decode_scale(byte: int) -> Fraction:
    if byte == 0x7F:
        return Fraction(0)
    exponent, mantissa = byte >> 3, byte & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


SCALES = [decode_scale(byte) for byte in range(0x7F)]


def encode_scale(value: float) -> int:
    """Nearest of the 127 values, ties to the even byte, saturating."""
    if not value > 0:
        return 0
    if value >= 448:
        return 0x7E
    return min(range(0x7F), key=lambda byte: (abs(SCALES[byte] - Fraction(value)), byte & 1))


def index_of(magnitude: float, ties_even: bool) -> int:
    if magnitude == INFINITY:
        return 7
    exact = Fraction(magnitude)
    if ties_even:
        return min(range(8), key=lambda i: (abs(MAGNITUDES[i] - exact), i & 1))
    return sum(exact > midpoint for midpoint in MIDPOINTS)


def requantize(values: list[float], byte: int, ties_even: bool) -> tuple[list[int], float]:
    """Codes for a scale byte, and their error."""
    scale = SCALES[byte]
    inverse = round32(1 / scale) if scale else 0.0
    codes, error = [], 0.0
    for value in values:
        scaled = round32(Fraction(abs(value)) * Fraction(inverse))
        index = index_of(scaled, ties_even)
        distance = round32(Fraction(abs(value)) - MAGNITUDES[index] * scale)
        error = fma(distance, distance, error)
        codes.append(index + 8 * (value < 0))
    return codes, error


def quantize_block(values: list[float], search: bool, ties_even: bool) -> tuple[list[int], int]:
    """Codes and scale byte of 16 float32 numbers."""
    if not np.isfinite(values).all():
        return [0] * 16, 0
    plain = encode_scale(round32(Fraction(max(map(abs, values))) / 6))
    best, best_error = plain, requantize(values, plain, ties_even)[1]
    for offset in (-1, 1, -2, 2) if search else ():
        if 0 <= plain + offset <= 0x7E:
            error = requantize(values, plain + offset, ties_even)[1]
            if error < best_error:
                best, best_error = plain + offset, error
    return requantize(values, best, ties_even)[0], best
