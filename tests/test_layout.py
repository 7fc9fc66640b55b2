"""The tiled layout: a permutation without loss, and the documented place of named codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbit.format import SUPPORTED_BITS, bitplanes, layout

SHAPES = [(1, 1), (16, 64), (17, 33), (15, 65), (40, 576), (33, 1000), (128, 256)]


def random_parts(
    n: int, k: int, bits: int, leading: tuple[int, ...] = (), seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-k // 32)
    size = (*leading, n, blocks)
    codes = torch.randint(0, 2**bits, (*leading, n, blocks * 32), generator=generator, dtype=torch.uint8)
    absmax = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return bitplanes.pack(codes, bits), absmax


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("leading", [(), (1,), (3,)])
def test_round_trip(bits: int, n: int, k: int, leading: tuple[int, ...]) -> None:
    packed, absmax = random_parts(n, k, bits, leading)
    tiled = layout.to_tiled(packed, absmax, bits, k)
    assert tiled.dtype == torch.int32
    assert tiled.shape == (*leading, *layout.tile_shape(n, k, bits))
    back, scales = layout.from_tiled(tiled, bits, n, k)
    assert torch.equal(back, packed)
    assert torch.equal(scales, absmax)
    assert back.is_contiguous()
    assert scales.is_contiguous()


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(SUPPORTED_BITS),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    experts=st.integers(0, 3),
    seed=st.integers(0, 2**20),
)
def test_round_trip_of_any_shape(bits: int, n: int, k: int, experts: int, seed: int) -> None:
    leading = (experts,) if experts else ()
    packed, absmax = random_parts(n, k, bits, leading, seed)
    back, scales = layout.from_tiled(layout.to_tiled(packed, absmax, bits, k), bits, n, k)
    assert torch.equal(back, packed)
    assert torch.equal(scales, absmax)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_whole_tiles_are_a_permutation_of_bits(bits: int) -> None:
    """Nothing is padded, so every word of a tile is given by its inverse: both ways are exact."""
    generator = torch.Generator().manual_seed(bits)
    shape = layout.tile_shape(48, 128, bits)
    tiled = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    packed, absmax = layout.from_tiled(tiled, bits, 48, 128)
    assert packed.nbytes + absmax.nbytes == tiled.nbytes
    assert torch.equal(layout.to_tiled(packed, absmax, bits, 128), tiled)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_padding_is_zero(bits: int) -> None:
    n, k = 17, 33
    packed = torch.full((n, 2 * bits), -1, dtype=torch.int32)
    absmax = torch.full((n, 2), 255, dtype=torch.uint8)
    whole_packed, whole_absmax = layout.from_tiled(layout.to_tiled(packed, absmax, bits, k), bits, 32, 64)
    assert torch.equal(whole_packed[:n], packed)
    assert torch.equal(whole_absmax[:n], absmax)
    assert int(whole_packed[n:].count_nonzero()) == 0
    assert int(whole_absmax[n:].count_nonzero()) == 0


# (bits, row, column) of one code and the (word, bit) of its lowest bit in the tile, by the text of layout.py.
PLACES = [
    # Row 0, column 0: lane 0, pair 0, first.
    (2, 0, 0, 0, 0),
    (3, 0, 0, 0, 0),
    (4, 0, 0, 0, 0),
    (5, 0, 0, 128, 15),  # of the largest code of 5 bits, bit 4 alone is set
    # Row 5, column 3: g = 5, t = 1: lane 21, pair 0, second.
    (2, 5, 3, 42, 4),  # behind the first codes of two pairs
    (3, 5, 3, 42, 3),
    (4, 5, 3, 84, 4),
    (5, 5, 3, 128 + 21, 31),
    # Row 9, column 14: g = 1, t = 3: lane 7; h = 1 + 2, j = 0: pair 3, first.
    (2, 9, 14, 14, 10),  # byte 1 has pairs 2 and 3
    (3, 9, 14, 14, 24),
    (4, 9, 14, 28, 24),
    (5, 9, 14, 128 + 7, 12),
    # Row 2, column 41: j = 2, column 9 of its 16: h = 2, t = 0: lane 8, pair 10, second.
    (2, 2, 41, 17, 12),  # word 1, third of its pairs, which begins its byte 1
    (3, 2, 41, 64 + 8, 19),  # a byte each: pair 10 is byte 2 of word 2
    (4, 2, 41, 34, 20),  # word 2, third
    (5, 2, 41, 128 + 8, 21),
    # Row 15, column 63: lane 31, pair 15, second: the pair in the spare bits of 3.
    (2, 15, 63, 63, 30),
    (4, 15, 63, 127, 28),
    (5, 15, 63, 128 + 31, 16),
]


@pytest.mark.parametrize(("bits", "row", "column", "word", "bit"), PLACES)
def test_codes_are_where_the_text_says(bits: int, row: int, column: int, word: int, bit: int) -> None:
    code = 2**bits - 1
    tile = tile_with_code(bits, row, column, code)
    expected = torch.zeros(layout.tile_words(bits), dtype=torch.int64)
    expected[word] = (1 if bits == 5 else code) << bit
    assert (tile.long() & 0xFFFFFFFF).tolist() == expected.tolist()


def tile_with_code(bits: int, row: int, column: int, code: int) -> torch.Tensor:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[row, column] = code
    absmax = torch.zeros(16, 2, dtype=torch.uint8)
    return layout.to_tiled(bitplanes.pack(codes, bits), absmax, bits, 64)[0, 0]


def test_the_last_pair_is_spread_over_the_spare_bits() -> None:
    """Lane 31, pair 15 = rows 15, columns 62 and 63; here 0b110 and 0b101: 0b101110, two bits a word."""
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[15, 62], codes[15, 63] = 0b110, 0b101
    absmax = torch.zeros(16, 2, dtype=torch.uint8)
    tile = layout.to_tiled(bitplanes.pack(codes, 3), absmax, 3, 64)[0, 0].long() & 0xFFFFFFFF
    assert tile.nonzero().flatten().tolist() == [62, 63, 95]
    assert tile[[62, 63, 95]].tolist() == [0b10 << 30, 0b11 << 30, 0b10 << 30]


def test_codes_of_5_bits_are_signs_and_magnitudes() -> None:
    """Lane 31, pair 15 again; 0b10110 is stored as 1 and the inverse of 0b0110, 0b01001 as 0 and itself."""
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[15, 62], codes[15, 63] = 0b10110, 0b01001
    absmax = torch.zeros(16, 2, dtype=torch.uint8)
    tile = layout.to_tiled(bitplanes.pack(codes, 5), absmax, 5, 64)[0, 0].long() & 0xFFFFFFFF
    assert tile.nonzero().flatten().tolist() == [127, 159]
    assert tile[[127, 159]].tolist() == [0b1001_1001 << 24, 1 << 0]


def test_scales_are_where_the_text_says() -> None:
    absmax = torch.zeros(16, 2, dtype=torch.uint8)
    absmax[3, 0], absmax[3, 1], absmax[11, 0], absmax[11, 1] = 0x12, 0x34, 0x56, 0x78
    tile = layout.to_tiled(torch.zeros(16, 8, dtype=torch.int32), absmax, 4, 64)[0, 0]
    assert tile.nonzero().flatten().tolist() == [128 + 3]
    assert int(tile[131]) == 0x78563412


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_word_of_a_tile_has_one_owner(bits: int) -> None:
    assert sorted(layout.lane_words(bits).flatten().tolist()) == list(range(32 * bits))


def test_wrong_parts_are_refused() -> None:
    packed, absmax = random_parts(16, 64, 4)
    with pytest.raises(TypeError, match=r"absmax uint8 \(E4M4\), got torch.int32 and torch.float16"):
        layout.to_tiled(packed, absmax.half(), 4, 64)
    with pytest.raises(ValueError, match=r"96 in-features at 4 bits need packed \[..., N, 12\]"):
        layout.to_tiled(packed, absmax, 4, 96)
    tiled = layout.to_tiled(packed, absmax, 4, 64)
    with pytest.raises(ValueError, match=r"\[17, 64\] at 4 bits is int32 \[..., 2, 1, 136\], got"):
        layout.from_tiled(tiled, 4, 17, 64)
