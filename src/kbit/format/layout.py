"""The tiled layout, in which CUDA kernels read weights, and its reference permutation in pure PyTorch.

A tile is 16 rows (n) by 64 columns (k) of one matrix: a record of 32 * bits words of codes and 8 words of
E4M4 scales, all int32. A weight [N, K] is ceil(N / 16) x ceil(K / 64) records. What lies outside the
canonical form is padded with code 0 and scale 0: a permutation of the bit-planes, without loss.

Codes. Lane 4g + t of a warp (g = 0..7, t = 0..3) owns 32 codes, as the 16 pairs that are its A registers of
four `mma.m16n8k16`: pair 4j + h, j = 0..3 the step of 16 columns, h = 0..3 the register, holds

    row g + 8 (h & 1), columns 16j + 8 (h >> 1) + 2t and the next:  code(first) | code(next) << bits

Pairs fill the lane's `bits` words from bit 0 up: at 3 and 4 bits a byte each, so that a kernel picks them by
byte. At 2 bits two share a byte, whose bits from 0 up are the first codes of both and then the second ones:
no nibble has both codes of a pair. The last pairs of 3 bits have no field of their own: pair 12 + b lies in
the top of byte b of each word w, which has its bits 2w and 2w + 1.

At 5 bits words 0 to 3 are those of 4 bits, of the codes' low four bits, all inverted where bit 4 is set: 0 is
the largest magnitude of either sign. Word 4 has bit 4 of pair i's codes, the first one's at bit 15 - i and
the second one's at 31 - i. So a kernel looks up pairs of negative levels by byte, and a codebook that is
symmetric around 0 has the others' signs in that word.

Words. A lane's words are placed so that it reads them by one load of 8 bytes (2 and 3 bits) or 16 bytes
(4 and 5 bits) and at most one of 4, without bank conflicts: first those vectors lane by lane, then the last
word (3 and 5 bits) lane by lane.

Scales. Byte 2r + b of scale word g is the scale of row g + 8r in the tile's block b of 32 columns.

NVFP4 has tiles of its own, much like these: `kbit.format.nvfp4_layout`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.format import bitplanes
from kbit.format.codebook import BLOCK_SIZE, check_bits
from kbit.format.reference import blocks_of

TILE_ROWS, TILE_COLUMNS = 16, 64
SCALE_WORDS = 8
LANES = 32
PAIRS = 16
# Where the pairs of a word begin, and how far their second codes are.
_PAIR_BITS = {2: (0, 2, 8, 10, 16, 18, 24, 26), 3: (0, 8, 16, 24), 4: (0, 8, 16, 24)}
_SECOND = {2: 4, 3: 3, 4: 4}

_BLOCKS = TILE_COLUMNS // BLOCK_SIZE


def tile_words(bits: int) -> int:
    """int32 words of one tile."""
    return 32 * bits + SCALE_WORDS


def tile_shape(out_features: int, in_features: int, bits: int) -> tuple[int, int, int]:
    """Shape of the tiled form of a weight [out_features, in_features].

    Returns:
        (row tiles, column tiles, words of a tile); both sizes are padded to whole tiles.
    """
    return -(-out_features // TILE_ROWS), -(-in_features // TILE_COLUMNS), tile_words(bits)


def lane_words(bits: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Where a lane's words are in a tile: int64 [32, bits]."""
    vector = 4 if bits >= 4 else 2
    lane = torch.arange(LANES, device=device).unsqueeze(1)
    word = torch.arange(bits, device=device)
    return torch.where(word < vector, vector * lane + word, LANES * vector + lane)


def to_tiled(packed: torch.Tensor, absmax: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """Permute the canonical form into tiles.

    Args:
        packed: int32 [..., N, blocks * bits].
        absmax: uint8 [..., N, blocks], E4M4.
        bits: code width.
        in_features: K; blocks is K / 32 rounded up.

    Returns:
        int32 [..., *tile_shape(N, K, bits)].

    Raises:
        TypeError, ValueError: see `check_canonical`.
    """
    check_canonical(packed, absmax, bits, in_features)
    *leading, n, blocks = absmax.shape
    row_tiles, column_tiles, words = tile_shape(n, in_features, bits)
    more_rows, more_blocks = row_tiles * TILE_ROWS - n, column_tiles * _BLOCKS - blocks
    codes = F.pad(bitplanes.unpack(packed, bits), (0, more_blocks * BLOCK_SIZE, 0, more_rows))
    codes = codes.reshape(-1, row_tiles, 2, 8, column_tiles, 4, 2, 4, 2)
    # [E, row tile, r, g, column tile, j, c, t, p] -> [E, row tile, column tile, g, t, j, c, r, p]
    codes = codes.permute(0, 1, 4, 3, 7, 5, 6, 2, 8).reshape(-1, LANES, PAIRS, 2).long()
    tiles = torch.empty(codes.shape[0], words, dtype=torch.int32, device=packed.device)
    tiles[:, lane_words(bits, packed.device)] = _pack_pairs(codes[..., 0] | codes[..., 1] << bits, bits)
    scales = F.pad(absmax, (0, more_blocks, 0, more_rows))
    scales = scales.reshape(-1, row_tiles, 2, 8, column_tiles, _BLOCKS).permute(0, 1, 4, 3, 2, 5)
    tiles[:, -SCALE_WORDS:] = scales.reshape(-1, 4 * SCALE_WORDS).view(torch.int32)
    return tiles.view(*leading, row_tiles, column_tiles, words)


def from_tiled(
    tiled: torch.Tensor, bits: int, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `to_tiled`.

    Args:
        tiled: int32 [..., *tile_shape(out_features, in_features, bits)].
        bits: code width.
        out_features: N.
        in_features: K.

    Returns:
        packed int32 [..., N, blocks * bits] and absmax uint8 [..., N, blocks].

    Raises:
        TypeError, ValueError: see `check_tiled`.
    """
    check_tiled(tiled, bits, out_features, in_features)
    leading = tiled.shape[:-3]
    row_tiles, column_tiles, words = tiled.shape[-3:]
    blocks, rows = blocks_of(in_features), row_tiles * TILE_ROWS
    flat = tiled.reshape(-1, words)
    pairs = _unpack_pairs(flat[:, lane_words(bits, tiled.device)], bits)
    codes = torch.stack([pairs & (2**bits - 1), pairs >> bits], -1).to(torch.uint8)
    codes = codes.reshape(-1, row_tiles, column_tiles, 8, 4, 4, 2, 2, 2).permute(0, 1, 7, 3, 2, 5, 6, 4, 8)
    codes = codes.reshape(*leading, rows, column_tiles * TILE_COLUMNS)
    scales = flat[:, -SCALE_WORDS:].contiguous().view(torch.uint8)
    scales = scales.view(-1, row_tiles, column_tiles, 8, 2, _BLOCKS).permute(0, 1, 4, 3, 2, 5)
    scales = scales.reshape(*leading, rows, column_tiles * _BLOCKS)
    packed = bitplanes.pack(codes[..., :out_features, : blocks * BLOCK_SIZE], bits)
    return packed, scales[..., :out_features, :blocks].contiguous()


def _pack_pairs(pairs: torch.Tensor, bits: int) -> torch.Tensor:
    """Pairs int64 [..., 16] -> a lane's words, int32 [..., bits]."""
    if bits == 5:
        codes = torch.stack([pairs & 31, pairs >> 5], -1)
        signs = codes >> 4
        magnitudes = (codes ^ signs * 31) << torch.tensor([0, 4], device=pairs.device)
        word = (signs << _sign_bits(pairs.device)).sum((-1, -2)).unsqueeze(-1)
        return torch.cat([_pack_pairs(magnitudes.sum(-1), 4), _to_int32(word)], -1)
    at = torch.tensor(_PAIR_BITS[bits], device=pairs.device)
    count = bits * len(at)
    whole = pairs[..., :count].unflatten(-1, (bits, len(at)))
    words = ((whole & (2**bits - 1) | whole >> bits << _SECOND[bits]) << at).sum(-1)
    piece = torch.arange(0, 2 * bits, 2, device=pairs.device)
    for index in range(count, PAIRS):
        words |= (pairs[..., index : index + 1] >> piece & 3) << _spare_bit(index - count)
    return _to_int32(words)


def _unpack_pairs(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `_pack_pairs`."""
    if bits == 5:
        signs = words[..., 4:].unsqueeze(-1) >> _sign_bits(words.device) & 1
        magnitudes = _unpack_pairs(words[..., :4], 4)
        codes = torch.stack([magnitudes & 15, magnitudes >> 4], -1) ^ signs * 31
        return codes[..., 0] | codes[..., 1] << 5
    at, code = torch.tensor(_PAIR_BITS[bits], device=words.device), 2**bits - 1
    count = bits * len(at)
    unsigned = words.long() & 0xFFFFFFFF
    fields = (unsigned.unsqueeze(-1) >> at).flatten(-2)
    pairs = [fields & code | (fields >> _SECOND[bits] & code) << bits]
    piece = torch.arange(0, 2 * bits, 2, device=words.device)
    for index in range(count, PAIRS):
        pieces = unsigned >> _spare_bit(index - count) & 3
        pairs.append((pieces << piece).sum(-1, keepdim=True))
    return torch.cat(pairs, -1)


def _to_int32(words: torch.Tensor) -> torch.Tensor:
    """Unsigned words in int64 -> the same bits in int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _sign_bits(device: torch.device) -> torch.Tensor:
    """5 bits: where bit 4 of either code of a pair is in the last word, int64 [16, 2]."""
    return torch.tensor([15, 31], device=device) - torch.arange(PAIRS, device=device).unsqueeze(1)


def _spare_bit(extra: int) -> int:
    """3 bits: lowest of the two that each word holds of pair number `extra` of those without a field."""
    return 8 * extra + 6


def check_canonical(
    packed: torch.Tensor, absmax: torch.Tensor, bits: int, in_features: int, op: str = "tiled layout"
) -> None:
    """Check that the parts of a weight, or of a stack of them, can be tiled.

    Raises:
        TypeError: packed is not int32, or the block scales are not E4M4.
        ValueError: the shapes do not belong together.
    """
    if packed.dtype != torch.int32 or absmax.dtype != torch.uint8:
        raise TypeError(
            f"{op}: packed must be int32 and absmax uint8 (E4M4), got {packed.dtype} and {absmax.dtype}. "
            f"Quantize with scale='e4m4'; other block scales stay in canonical form."
        )
    blocks = blocks_of(in_features)
    expected = (*absmax.shape[:-1], blocks * check_bits(bits))
    stacked = absmax.dim() in (2, 3)
    if not stacked or in_features < 1 or absmax.shape[-1] != blocks or tuple(packed.shape) != expected:
        raise ValueError(
            f"{op}: {in_features} in-features at {bits} bits need packed [..., N, {blocks * bits}] and "
            f"absmax [..., N, {blocks}], got {tuple(packed.shape)} and {tuple(absmax.shape)}. Is in_features "
            f"that of another layer?"
        )


def check_tiled(
    tiled: torch.Tensor, bits: int, out_features: int, in_features: int, op: str = "tiled layout"
) -> None:
    """Check that tiles are of a weight [out_features, in_features], or of a stack of them.

    Raises:
        TypeError: they are not int32.
        ValueError: `bits` is no width of the format, or they have another shape.
    """
    check_bits(bits)
    if tiled.dtype != torch.int32:
        raise TypeError(f"{op}: tiles must be int32, got {tiled.dtype}.")
    check_tile_shape(op, tiled, bits, out_features, in_features)


def check_tile_shape(
    op: str, tiled: torch.Tensor, bits: int, out_features: int, in_features: int, suspects: str = "sizes"
) -> None:
    """Check that tiles are of a weight [out_features, in_features], or of a stack of them.

    Args:
        op: who takes them, for the message.
        tiled: int32.
        bits: code width.
        out_features: N.
        in_features: K.
        suspects: which arguments the caller may have confused.

    Raises:
        ValueError: they are not.
    """
    expected = tile_shape(out_features, in_features, bits)
    if (
        min(in_features - 1, out_features) < 0
        or tiled.dim() not in (3, 4)
        or tuple(tiled.shape[-3:]) != expected
    ):
        raise ValueError(
            f"{op}: [{out_features}, {in_features}] at {bits} bits is int32 [..., "
            f"{', '.join(map(str, expected))}], got {tuple(tiled.shape)}. Are the {suspects} those of "
            f"another layer?"
        )
