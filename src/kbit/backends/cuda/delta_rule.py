"""The gated delta rule over a prompt's tokens, csrc/gated_delta_chunks.cu and gated_delta_rule.cu: which they
take, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.gated_delta import DIM, RATIOS
from kbit.backends.reference import gated_delta as reference
from kbit.ops.gated_delta_schemas import Heads

_CHUNKS_FORMAT, _RULE_FORMAT = "Q" * 7 + "ii", "Q" * 9 + "iii"
_CHUNK = 64  # tokens
_COLUMNS = 32  # of a head's state, of a block
_CHUNKS_THREADS = _CHUNK // 16 * driver.WARP  # of a block of the first kernel
_LOADERS = 128  # threads of the second that fetch
_MOST_STAGES = 3
_PADDING = 16  # bytes behind a row in shared memory
_ROWS_BYTES = _CHUNK * (2 * DIM + _PADDING)


def _layout(room: int) -> dict[str, int]:
    """Chunks that are held at once, and their shared memory, where a block may have `room` bytes."""
    pitch, square = 2 * _COLUMNS + _PADDING, _CHUNK * (2 * _CHUNK + _PADDING)
    factors = _CHUNK * 4
    stage = 2 * (_ROWS_BYTES + square) + _CHUNK * pitch + 3 * factors
    handed = 2 * 2 * _COLUMNS * (DIM + _CHUNK)
    stages = min(_MOST_STAGES, (room - handed) // stage)
    return {"stages": stages, "shared_bytes": stages * stage + handed}


def _heads(ratio: int) -> int:
    """Heads of values of a block of the first kernel, of `ratio` that have one of keys."""
    return 2 - ratio % 2


def _chunks_bytes(heads: int) -> int:
    """Shared memory of that: rows of keys and queries, and two floats a token and head."""
    return 2 * _ROWS_BYTES + 2 * heads * _CHUNK * 4


@functools.cache
def _chunks_spec(dtype: torch.dtype, ratio: int) -> KernelSpec:
    heads = _heads(ratio)
    sizes = {"heads": heads, "groups": ratio // heads, "shared_bytes": _chunks_bytes(heads)}
    return _spec("gated_delta_chunks.cu", dtype, **sizes)


@functools.cache
def _rule_spec(dtype: torch.dtype, room: int) -> KernelSpec:
    sizes = {"columns": _COLUMNS, "loaders": _LOADERS, **_layout(room)}
    return _spec("gated_delta_rule.cu", dtype, **sizes)


def _spec(source: str, dtype: torch.dtype, **sizes: int) -> KernelSpec:
    return KernelSpec.make(source, bf16=dtype == torch.bfloat16, dim=DIM, chunk=_CHUNK, **sizes)


def specs(shared_bytes: int, ratios: Iterable[float] | None = None) -> list[KernelSpec]:
    """Every kernel of this module, for a GPU whose blocks may have `shared_bytes` of shared memory.

    Args:
        shared_bytes: see above.
        ratios: only those of layers with so many heads of values to one of keys.
    """
    chosen = RATIOS if ratios is None else [ratio for ratio in RATIOS if ratio in set(ratios)]
    chunks = [_chunks_spec(dtype, ratio) for dtype in operands.DTYPES for ratio in chosen]
    return chunks + [_rule_spec(dtype, shared_bytes) for dtype in operands.DTYPES]


def _fits(heads: Heads, batch: int, tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether the kernels compute heads like these, of tensors where they are."""
    plain = heads.columns == DIM and heads.values / heads.keys in RATIOS
    few = max(batch, heads.values) <= driver.MAX_GRID_Y
    return plain and few and not any(tensor is not None and tensor.data_ptr() % 16 for tensor in tensors)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    before: torch.Tensor | None,
    heads: Heads,
    out: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """`kbit::gated_delta_rule`; the reference where the kernels may not.

    Args:
        query, key, value, beta, decay, before: as in `kbit.ops.gated_delta_schemas`, contiguous.
        heads: of them.
        out: its results, contiguous, written; not empty.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    batch, tokens = query.shape[:2]
    if query.dtype not in operands.DTYPES or not _fits(heads, batch, (query, key, value, before, *out)):
        reference.gated_delta_rule(query, key, value, beta, decay, before, heads, out)
        return
    index, chunks, ratio = query.device.index, -(-tokens // _CHUNK), heads.values // heads.keys
    of_chunks = batch, chunks, heads.values, _CHUNK
    solved, scores = (query.new_empty(*of_chunks, _CHUNK) for _ in range(2))
    factors = decay.new_empty(batch, chunks, heads.values, 2, _CHUNK)
    made = operands.addresses(solved, scores, factors)
    kernel = launcher.load(_chunks_spec(query.dtype, ratio), index, _CHUNKS_FORMAT)
    args = (*operands.addresses(query, key, beta, decay), *made, tokens, heads.keys)
    grid, smem = (chunks, heads.values // _heads(ratio), batch), _chunks_bytes(_heads(ratio))
    launcher.launch_on(index, kernel, grid, _CHUNKS_THREADS, args, smem=smem, pdl=True)
    room = driver.device_limits(index).shared_bytes
    kernel = launcher.load(_rule_spec(query.dtype, room), index, _RULE_FORMAT)
    args = (*operands.addresses(query, key, value), *made, *operands.addresses(before, *out))
    grid = DIM // _COLUMNS, heads.values, batch
    threads = _COLUMNS // 16 * 2 * driver.WARP + _LOADERS
    sizes, smem = (tokens, heads.keys, ratio), _layout(room)["shared_bytes"]
    launcher.launch_on(index, kernel, grid, threads, (*args, *sizes), smem=smem, pdl=True)
