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
_HEADS = (16, 24, 32)  # of a block
_TOKENS, _WARPS, _QUARTERS = 32, 8, 4
_SPLITS = 64  # more blocks read no faster, and their sums take longer to add up
_MOST_BATCH = 65535  # blocks along z


class Sizes(NamedTuple):
    """Of a block.

    Attributes:
        latent, turned: columns.
        heads: their number.
    """

    latent: int
    turned: int
    heads: int

    @property
    def _stage_bytes(self) -> int:
        return _TOKENS * self._pitch

    @property
    def _pitch(self) -> int:
        return 2 * (self.latent + self.turned) + 16

    def _bytes(self, stages: int) -> int:
        scores = _QUARTERS * _TOKENS * self.heads * 4
        weights = self.heads * (2 * _TOKENS + 16 + 4)
        return stages * self._stage_bytes + self.heads * self._pitch + scores + weights

    def layout(self, room: int) -> tuple[int, int]:
        """Stages, and bytes of shared memory, for blocks that may have `room` bytes."""
        stages = 2 if self._bytes(2) <= room else 1
        return stages, self._bytes(stages)


def _spec(dtype: torch.dtype, sizes: Sizes, room: int) -> KernelSpec:
    stages, shared_bytes = sizes.layout(room)
    return KernelSpec.make(
        "latent_attention.cu",
        bf16=dtype == torch.bfloat16,
        **sizes._asdict(),
        stages=stages,
        shared_bytes=shared_bytes,
    )


def _combine_spec(dtype: torch.dtype, latent: int) -> KernelSpec:
    return KernelSpec.make("latent_combine.cu", bf16=dtype == torch.bfloat16, lanes=latent // 4)


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


@functools.lru_cache(maxsize=1024)
def plan(batch: int, heads: int, room: int, multiprocessors: int) -> tuple[int, int, int]:
    """Heads of a block, blocks that share a sequence's heads, and blocks that share its tokens."""
    groups = -(-heads // _HEADS[-1])
    each = next(count for count in _HEADS if count * groups >= heads)
    splits = min(_SPLITS, -(-2 * multiprocessors // (batch * groups)), -(-room // _TOKENS))
    return each, groups, max(1, splits)


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
    strides = [operands.pieces(tensor) for tensor in (query, absorbed, latent, cos, sin)]
    whole = None not in (*strides, *(operands.pieces(tensor) for tensor in (norm, latents, keys)))
    plain = query.dtype in operands.DTYPES and takes(columns, turned) and room > 0 and batch <= _MOST_BATCH
    if not (whole and plain and strides[3] == strides[4] and (mask is None or mask.stride(1) == 1)):
        given = query, absorbed, latent, norm, cos, sin, mask, latents, keys, length
        reference.latent_attention_step(*given, scaling, eps, plus_one, round_first, interleaved, out)
        return
    index = query.device.index
    device = driver.device_limits(index)
    each, groups, splits = plan(batch, heads, room, device.multiprocessors)
    sizes = Sizes(columns, turned, each)
    sums = query.new_empty((batch, splits, heads, columns), dtype=torch.float32)
    weights = query.new_empty((batch, splits, heads, 2), dtype=torch.float32)
    kernel = launcher.load(_spec(query.dtype, sizes, device.shared_bytes), index, _FORMAT)
    shared_bytes = sizes.layout(device.shared_bytes)[1]
    grid = (splits, groups, batch)
    prepared = launcher.Prepared(index, kernel, grid, _WARPS * driver.WARP, shared_bytes)
    given = operands.addresses(query, absorbed, latent, norm, cos, sin, mask, latents, keys, length)
    by_query, by_absorbed, by_latent, by_angle, _ = (stride or () for stride in strides)
    along = (
        by_latent[0],
        0 if len(cos) == 1 else by_angle[0],
        0 if mask is None or len(mask) == 1 else mask.stride(0),
    )
    how = heads, room, scaling, eps, plus_one, round_first, interleaved
    places = operands.addresses(sums, weights)
    prepared.launch((*given, *places, *by_query, *by_absorbed, *along, *how))
    combine = launcher.load(_combine_spec(query.dtype, columns), index, _COMBINE_FORMAT)
    prepared = launcher.Prepared(index, combine, (heads, batch, 1), columns // 4)
    prepared.launch((*places, *operands.addresses(length, out), heads, splits, room))
