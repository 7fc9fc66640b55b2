"""The byte layouts of NVFP4 and the lossless conversions between them.

 * nv (ModelOpt, compressed-tensors): codes [..., N, K16 / 2], element 2j in the low nibble of byte j; scales
   [..., N, K16 / 16]. K16 is K rounded up to 16.
 * ggml (GGUF): 64 elements in 36 bytes [..., N, 36 * ceil(K16 / 64)]: 4 scales, then 8 bytes per sub-block
   of 16, byte j holding element j low and element j + 8 high.
 * mmq (the activations of ggml's CUDA products): 256 elements in 144 bytes: 16 scales, then 8 bytes per
   sub-block in the nibble order of ggml. Blocks are column-major, [..., 2 * ceil(K16 / 512), N, 144].
 * tiled (weights, for the GPU kernels of `exact` and `tc`): 16 rows by 64 columns in 576 bytes,
   [..., ceil(N / 16), ceil(K16 / 64), 576]; `kbit.format.nvfp4_layout` says where which bytes are.
Padding is bytes of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kbit.backends.cuda import weights
from kbit.format import nvfp4_layout as tiles
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS
from kbit.format.words import at
from kbit.nvfp4.formats import e2m1

SUB_BLOCK = tiles.BLOCK
LAYOUTS = ("nv", "ggml", "mmq", "tiled")


@dataclass(frozen=True)
class _Blocks:
    """A layout of interleaved scales and codes: sub-blocks in a block, and what K is padded to."""

    sub_blocks: int
    padding: int

    @property
    def nbytes(self) -> int:
        return self.sub_blocks * 9


_INTERLEAVED = {"ggml": _Blocks(4, 64), "mmq": _Blocks(16, 512)}


def check_layout(layout: str, op: str = "nvfp4", where: str = "") -> str:
    """Return `layout` if it is one; `where` is the name of the layer, for the message.

    Raises:
        ValueError: it is not.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f'{op}: layout must be one of {", ".join(LAYOUTS)}, got {layout!r}{at(where)}. Use "nv", or '
            f'"tiled" for weights that a GPU multiplies.'
        )
    return layout


def round_up(columns: int, multiple: int = SUB_BLOCK) -> int:
    """The next multiple."""
    return -(-columns // multiple) * multiple


def codes_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Shape of the uint8 codes (or interleaved bytes) of a tensor of shape [..., N, K]."""
    *lead, rows, columns = shape
    if layout == "nv":
        return (*lead, rows, round_up(columns) // 2)
    if layout == "tiled":
        row_tiles, column_tiles = -(-rows // TILE_ROWS), -(-columns // TILE_COLUMNS)
        return (*lead, row_tiles, column_tiles, tiles.TILE_BYTES)
    block = _INTERLEAVED[layout]
    blocks = round_up(columns, block.padding) // SUB_BLOCK // block.sub_blocks
    if layout == "ggml":
        return (*lead, rows, blocks * block.nbytes)
    return (*lead, blocks, rows, block.nbytes)


def from_nv(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> torch.Tensor:
    """nv codes and scales -> the bytes of an interleaved layout.

    Args:
        codes: uint8 [..., N, K16 / 2].
        scales: uint8 [..., N, K16 / 16].
        layout: "ggml", "mmq" or "tiled".

    Returns:
        uint8; see the module.
    """
    if not codes.numel():
        return codes.new_empty(codes_shape((*codes.shape[:-1], 2 * codes.shape[-1]), layout))
    if layout == "tiled":
        return weights.fenced(tiles.to_tiled(codes, scales))
    block = _INTERLEAVED[layout]
    groups = scales.shape[-1]
    missing = round_up(groups * SUB_BLOCK, block.padding) // SUB_BLOCK - groups
    elements = e2m1.unpack(codes).unflatten(-1, (groups, SUB_BLOCK))
    packed = elements[..., :8] | (elements[..., 8:] << 4)
    packed = F.pad(packed, (0, 0, 0, missing)).unflatten(-2, (-1, block.sub_blocks)).flatten(-2)
    padded = F.pad(scales, (0, missing)).unflatten(-1, (-1, block.sub_blocks))
    blocks = torch.cat([padded, packed], dim=-1)
    return blocks.flatten(-2) if layout == "ggml" else blocks.transpose(-3, -2).contiguous()


def to_nv(
    data: torch.Tensor, layout: str, columns: int, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of an interleaved layout -> nv codes and scales; the reverse of `from_nv`.

    Args:
        data: uint8 in layout "ggml", "mmq" or "tiled".
        layout: which.
        columns: K.
        rows: N, which "tiled" pads to whole tiles; None for as many as these hold.

    Returns:
        codes [..., N, K16 / 2], scales [..., N, K16 / 16].
    """
    groups = round_up(columns) // SUB_BLOCK
    if layout == "tiled":
        rows = data.shape[-3] * TILE_ROWS if rows is None else rows
        if not data.numel():
            lead = (*data.shape[:-3], rows)
            return data.new_empty((*lead, groups * SUB_BLOCK // 2)), data.new_empty((*lead, groups))
        return tiles.from_tiled(data, rows, columns)
    block = _INTERLEAVED[layout]
    blocks = data.unflatten(-1, (-1, block.nbytes)) if layout == "ggml" else data.transpose(-3, -2)
    scales = blocks[..., : block.sub_blocks].flatten(-2)[..., :groups].contiguous()
    packed = blocks[..., block.sub_blocks :].unflatten(-1, (-1, 8)).flatten(-3, -2)[..., :groups, :]
    elements = torch.cat([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return e2m1.pack(elements), scales
