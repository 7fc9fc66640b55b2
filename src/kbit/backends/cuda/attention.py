"""A token's step of attention with shared heads of keys and values, csrc/attention_step.cu: which it takes,
and its launch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import attention as reference

_FORMAT = "Q" * 13 + "Q" * 10 + "iiiiiffii"
_TOKENS, _HEADS = 16, 8  # of a chunk; of a block
_TURNED = 2 * operands.PIECE  # columns that are turned are a multiple of it
# Of a cache: room from which on uneven loads of multiprocessors cost more than idle ones, and from which on
# up to _FEW clusters gain from being large.
_LONG, _LARGE_CLUSTERS, _FEW = 8192, 2048, 4


class Config(NamedTuple):
    """Compile-time choices of attention_step.cu.

    Attributes:
        columns: of a head.
        warps: of a block.
        stages: chunks that a warp has in flight.
        blocks: that run at once on a multiprocessor.
    """

    columns: int
    warps: int
    stages: int
    blocks: int = 2

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, as the kernel's header lays it out."""
        pitch = 2 * self.columns + 16
        exchanged = _HEADS * self.columns // 4 * 24 + 16
        return (self.warps * self.stages * 2 * _TOKENS + _HEADS + 2) * pitch + exchanged


_CONFIGS = {config.columns: config for config in (Config(64, 8, 2), Config(128, 8, 1), Config(256, 4, 1))}


@functools.cache
def config_for(columns: int, arch: str, shared_bytes: int) -> Config | None:
    """What heads of so many columns run by, where a block may have `shared_bytes`; None if by nothing here.

    Args:
        columns: of a head.
        arch: of the GPU, such as "90a".
        shared_bytes: most shared memory of a block there.
    """
    config = _CONFIGS.get(columns)
    if config is None or not driver.since_hopper(arch) or config.shared_bytes > shared_bytes:
        return None
    fits = config.shared_bytes <= driver.room(shared_bytes, config.blocks)
    return config if fits else config._replace(blocks=1)


def _spec(dtype: torch.dtype, config: Config) -> KernelSpec:
    bf16 = dtype == torch.bfloat16
    return KernelSpec.make(
        "attention_step.cu", bf16=bf16, **config._asdict(), shared_bytes=config.shared_bytes
    )


def specs(arch: str, shared_bytes: int, columns: Iterable[int] = tuple(_CONFIGS)) -> list[KernelSpec]:
    """The kernels for heads of so many columns, for a GPU as in `config_for`."""
    configs = [config_for(each, arch, shared_bytes) for each in columns]
    return [_spec(dtype, config) for dtype in operands.DTYPES for config in configs if config is not None]


def takes(device: torch.device, columns: int, turned: int) -> bool:
    """Whether there is a kernel for heads of so many columns, `turned` of them by angles, on a device."""
    if device.type != "cuda" or device.index is None or turned % _TURNED:
        return False
    limits = driver.device_limits(device.index)
    return config_for(columns, limits.arch, limits.shared_bytes) is not None


class Plan(NamedTuple):
    """A launch.

    Attributes:
        groups: blocks, or clusters, that share a head of keys: of up to 8 query heads each.
        blocks: of a cluster, which share a cache's tokens.
    """

    groups: int
    blocks: int


@functools.lru_cache(maxsize=1024)
def plan(
    *,
    batch: int,
    heads: int,
    key_heads: int,
    room: int,
    config: Config,
    device: driver.DeviceLimits,
    most: int,
) -> Plan:
    """The launch for caches with room for so many tokens: as many blocks as run at once, if half have work.

    Blocks that do not run at once with the others cost a second turn: 8 sequences of 4 heads of keys, 1024
    tokens, took 6.3 us with clusters of 4 on an H100, with 8 of them 10.3. With long caches some
    multiprocessors with two blocks, others with one, are as bad: 4 sequences of 8 heads, 16384 tokens, took
    99 us with clusters of 2, with 4 of them 116. Few clusters leave most of the machine idle, if they are no
    larger than any GPU runs: one sequence of 2 heads of 256 columns, 16384 tokens, took 30 us with clusters
    of 16, with 8 of them 43.

    Args:
        batch, heads, key_heads, room: of the problem.
        config: of the kernel.
        device: what it runs on.
        most: blocks of a cluster there, 8 or 16.
    """
    groups = -(-heads // (key_heads * _HEADS))
    clusters, busy, long = batch * key_heads * groups, -(-room // (_TOKENS * config.warps)), room >= _LONG
    if most > launcher.PORTABLE_CLUSTER and clusters <= _FEW and room >= _LARGE_CLUSTERS:
        return Plan(groups, most)
    for blocks in (8, 4, 2):
        at_once = device.clusters(blocks)
        uneven = clusters > at_once and 2 * clusters * blocks < 3 * device.multiprocessors
        if blocks <= 2 * busy and clusters <= config.blocks * at_once and not (long and uneven):
            return Plan(groups, blocks)
    return Plan(groups, 1)


def attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::attention_step`; the reference where the kernel may not.

    Args:
        query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length, scaling, eps,
            plus_one, round_first: as in `kbit.ops.attention_schemas`.
        out: [B, H, D], contiguous.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    (batch, heads, columns), (_, key_heads, room, _) = query.shape, keys.shape
    index, turned = query.device.index, cos.shape[1]
    device = driver.device_limits(index)
    gating = query if gate is None else gate
    strides = operands.all_pieces(query, key, value, gating, cos, sin, query_norm, key_norm, keys, values)
    config = config_for(columns, device.arch, device.shared_bytes)
    plain = query.dtype in operands.DTYPES and not turned % _TURNED and room > 0
    plain = plain and max(batch, heads) <= driver.MAX_GRID_Y and cos.stride() == sin.stride()
    plain = plain and (mask is None or mask.stride(1) == 1)
    if config is None or strides is None or not plain:
        tensors = query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length
        reference.attention_step(*tensors, scaling, eps, plus_one, round_first, out)
        return
    kernel = launcher.load(_spec(query.dtype, config), index, _FORMAT)
    threads, smem, most = config.warps * driver.WARP, config.shared_bytes, launcher.MAX_CLUSTER
    most = most if kernel.takes_cluster(most, threads, smem) else launcher.PORTABLE_CLUSTER
    sizes = {"batch": batch, "heads": heads, "key_heads": key_heads, "room": room}
    groups, blocks = plan(**sizes, config=config, device=device, most=most)
    grid = (blocks, key_heads * groups, batch)
    new = operands.addresses(query, key, value, gate, query_norm, key_norm, cos, sin, mask)
    cache = operands.addresses(keys, values, length, out)
    by = (step for of_heads in strides[:4] for step in of_heads)
    by_mask = 0 if mask is None or len(mask) == 1 else mask.stride(0)
    along = (*operands.by_sequence(cos, strides[4]), by_mask)
    counts = heads, key_heads, groups, room, turned // _TURNED
    args = (*new, *cache, *by, *along, *counts, scaling, eps, plus_one, round_first)
    launcher.launch_on(index, kernel, grid, threads, args, smem=smem, pdl=True, cluster=blocks)
