"""A step of multi-head latent attention, csrc/latent_attention.cu and latent_combine.cu: which they take, and
their launches."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import latent as reference

_FORMAT = "Q" * 12 + "Q" * 7 + "iiffiii"
_COMBINE_FORMAT = "QQQQiii"
_COLUMNS = ((512, 64),)  # of latents and turned keys: DeepSeek's and GLM's
_HEADS = (16, 20, 32)  # of a block
_TOKENS, _WARPS, _QUARTERS = 32, 8, 4
# Of latent_combine.cu: columns of a block, splits that a warp loads at once, most warps.
_COMBINED, _COMBINE_SPLITS, _COMBINE_WARPS = 4 * driver.WARP, 8, 16
_SPLITS = 128  # sums of more take longer to add up than they save


class Sizes(NamedTuple):
    """Of a block.

    Attributes:
        latent, turned: columns.
        heads: their number.
    """

    latent: int
    turned: int
    heads: int

    def _bytes(self, stages: int) -> int:
        columns = -(-self.heads // 8) * 8  # of scores
        scores = _QUARTERS * _TOKENS * columns * 4
        weights = columns * (2 * _TOKENS + 16 + 4)
        pitch = 2 * (self.latent + self.turned) + 16
        return (stages * _TOKENS + self.heads + 1) * pitch + scores + weights

    def layout(self, room: int) -> dict[str, int]:
        """Stages, blocks of a multiprocessor, and their shared memory, where one may have `room` bytes."""
        stages = 2 if self._bytes(2) <= room else 1
        shared_bytes = self._bytes(stages)
        blocks = 2 if shared_bytes <= driver.room(room, 2) else 1
        return {"stages": stages, "blocks": blocks, "shared_bytes": shared_bytes}


def _spec(dtype: torch.dtype, sizes: Sizes, room: int) -> KernelSpec:
    common = {"bf16": dtype == torch.bfloat16, "tokens": _TOKENS}
    return KernelSpec.make("latent_attention.cu", **common, **sizes._asdict(), **sizes.layout(room))


def _combine_spec(dtype: torch.dtype, latent: int) -> KernelSpec:
    common = {"bf16": dtype == torch.bfloat16, "tokens": _TOKENS}
    warps = {"warps": _COMBINE_WARPS, "at_once": _COMBINE_SPLITS}
    return KernelSpec.make("latent_combine.cu", **common, lanes=latent // 4, splits=_SPLITS, **warps)


def specs(shared_bytes: int) -> list[KernelSpec]:
    """Every kernel of this module, for a GPU whose blocks may have `shared_bytes` of shared memory."""
    found = []
    for dtype in operands.DTYPES:
        for columns in _COLUMNS:
            found += [_spec(dtype, Sizes(*columns, heads), shared_bytes) for heads in _HEADS]
            found.append(_combine_spec(dtype, columns[0]))
    return found


def takes(latent: int, turned: int) -> bool:
    """Whether the kernels compute latents of so many columns, with keys of `turned`."""
    return (latent, turned) in _COLUMNS


class Plan(NamedTuple):
    """A launch.

    Attributes:
        sizes: of a block.
        groups: blocks that share a sequence's heads.
        splits: blocks that share its tokens.
    """

    sizes: Sizes
    groups: int
    splits: int


@functools.lru_cache(maxsize=1024)
def plan(batch: int, heads: int, columns: tuple[int, int], room: int, device: driver.DeviceLimits) -> Plan:
    """The launch for caches with room for so many tokens: no more blocks than run at once."""
    groups = -(-heads // _HEADS[-1])
    sizes = Sizes(*columns, next(count for count in _HEADS if count * groups >= heads))
    at_once = sizes.layout(device.shared_bytes)["blocks"] * device.multiprocessors
    splits = min(_SPLITS, at_once // (batch * groups), -(-room // _TOKENS))
    return Plan(sizes, groups, max(1, splits))


def latent_attention_step(
    query: torch.Tensor,
    absorbed: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    latents: torch.Tensor,
    keys: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    eps: float,
    plus_one: bool,
    round_first: bool,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::latent_attention_step`; the reference where the kernels may not.

    Args:
        query, absorbed, latent, norm, cos, sin, mask, latents, keys, length, scaling, eps, plus_one,
            round_first, interleaved: as in `kbit.ops.latent_schemas`.
        out: [B, H, C], contiguous.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    (batch, heads, columns), room, turned = absorbed.shape, latents.shape[1], keys.shape[2]
    strides = operands.all_pieces(query, absorbed, latent, cos, sin, norm, latents, keys)
    how = scaling, eps, plus_one, round_first, interleaved
    plain = query.dtype in operands.DTYPES and takes(columns, turned) and room > 0
    plain = plain and batch <= driver.MAX_GRID_Y and (mask is None or mask.stride(1) == 1)
    if not plain or strides is None or strides[3] != strides[4]:
        tensors = query, absorbed, latent, norm, cos, sin, mask, latents, keys, length
        reference.latent_attention_step(*tensors, *how, out)
        return
    index = query.device.index
    device = driver.device_limits(index)
    sizes, groups, splits = plan(batch, heads, (columns, turned), room, device)
    sums = query.new_empty((batch, splits, heads, columns), dtype=torch.float32)
    weights = query.new_empty((batch, splits, heads, 2), dtype=torch.float32)
    kernel = launcher.load(_spec(query.dtype, sizes, device.shared_bytes), index, _FORMAT)
    shared_bytes = sizes.layout(device.shared_bytes)["shared_bytes"]
    given = operands.addresses(query, absorbed, latent, norm, cos, sin, mask, latents, keys, length)
    by_query, by_absorbed, by_latent, by_angle, *_ = strides
    by_mask = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    by = (*by_query, *by_absorbed, *by_latent, *operands.by_sequence(cos, by_angle), by_mask)
    places = operands.addresses(sums, weights)
    args, grid = (*given, *places, *by, heads, room, *how), (splits, groups, batch)
    launcher.launch_on(index, kernel, grid, _WARPS * driver.WARP, args, smem=shared_bytes, pdl=True)
    combine = launcher.load(_combine_spec(query.dtype, columns), index, _COMBINE_FORMAT)
    warps = min(_COMBINE_WARPS, -(-splits // _COMBINE_SPLITS))
    grid = (heads, batch, columns // _COMBINED)
    args = (*places, *operands.addresses(length, out), heads, splits, room)
    launcher.launch_on(index, combine, grid, warps * driver.WARP, args, pdl=True)
