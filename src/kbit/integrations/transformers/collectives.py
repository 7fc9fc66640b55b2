"""Sums over ranks: by the process group's collective, or for small tensors by GPUs that write to each other.

Decoding adds up a few kilobytes twice a layer, where latency is all that counts. In a one-shot all-reduce
every GPU writes its tensor into memory that the others have mapped, waits for theirs, and adds all of them
itself: one kernel, one crossing of the link, where NCCL's rings cross it twice. The kernel is
`kbit::one_shot_sum`, or `kbit::one_shot_gather` for columns of all ranks, the memory that of
`torch.distributed._symmetric_memory`. For large tensors NCCL moves less.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kbit.backends.cuda.ranks import LINE_BYTES, RANKS, STATE, Inboxes, inbox_bytes, load
from kbit.ops import checks

ALL_REDUCES = NCCL, ONE_SHOT = "nccl", "one-shot"
_VARIABLE = "KBIT_ALL_REDUCE"
_log = logging.getLogger(__name__)
# Of a tensor, times ranks: each is written to every rank, which at some size costs more than NCCL's latency.
# On two H100s 4 KiB take 2.3 us, by NCCL 13, and 256 KiB 4 and 14; more was not measured.
ONE_SHOT_BYTES = 2**21

# By the process group's name. Memory lives as long as the process: CUDA graphs hold its address.
_mapped: dict[str, tuple[torch.Tensor, Inboxes]] = {}
_used: dict[str, Inboxes] = {}


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' `x`, the same bits on all; written over it, or into a new tensor."""
    inboxes = _inboxes_for(x, x.nbytes, group)
    if inboxes is None:
        dist.all_reduce(x, group=group)
        return x
    return torch.ops.kbit.one_shot_sum(x, *inboxes)


def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[..., columns] of every rank -> [..., ranks * columns]."""
    inboxes = _inboxes_for(x, x.shape[-1] * x.element_size(), group)
    if inboxes is not None:
        return torch.ops.kbit.one_shot_gather(x, *inboxes)
    received = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather_into_tensor(received, x[None].contiguous(), group=group)
    return received.movedim(0, -2).flatten(-2)


def _inboxes_for(x: torch.Tensor, whole: int, group: Any) -> Inboxes | None:
    """Where ranks put x, of which so many bytes stay together; None if that is for the process group."""
    inboxes = _used.get(group.group_name) if _used else None
    if inboxes is None or x.dtype not in checks.HALF_DTYPES or x.device != inboxes.state.device:
        return None
    return inboxes if 0 < x.nbytes <= LINE_BYTES * inboxes.capacity and not whole % LINE_BYTES else None


def use_where_possible(model: Any) -> None:
    """`use_one_shot` for the ranks of a model that was split and loaded; every rank must call it.

    Raises:
        ValueError: KBIT_ALL_REDUCE is wrong.
    """
    asked = os.environ.get(_VARIABLE) or ONE_SHOT
    if asked not in ALL_REDUCES:
        known = " or ".join(ALL_REDUCES)
        raise ValueError(f"{_VARIABLE} must be {known}, got {asked!r}. Unset it, or set another.")
    for group, layer in {layer.split.group: layer for layer in _split_layers(model)}.items():
        if layer.codebook.is_cuda:
            reason = use_one_shot(group, model.dtype, layer.codebook.device)
            if reason is not None:
                _log.info("sums over ranks are left to %s: %s", dist.get_backend(group), reason)


def _split_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "split")]


def use_one_shot(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Have small sums of a group's ranks done by one-shot all-reduces from now on; every rank must call it.

    All ranks must then compute the same sums in the same order, as with NCCL, and on one stream. Loading a
    split model does this where it can; KBIT_ALL_REDUCE=nccl on any rank leaves all to the process group.

    Args:
        group: a process group of GPUs of one machine.
        dtype: of the activations.
        device: this rank's.

    Returns:
        Why it cannot be, the same on all ranks where one fails; None if it is on.
    """
    # Step by step, each agreed on: a rank alone in a collective would wait forever.
    for step in (_check, _map, _load, _try):
        reason = None
        try:
            reason = step(group, dtype, device)
        except (RuntimeError, ImportError, AttributeError, ValueError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failed.item():
            _used.pop(group.group_name, None)
            return reason or "another rank could not"
    return None


def _check(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    ranks = dist.get_world_size(group)
    # Kept by all ranks, whatever the others find.
    same = torch.tensor(_machine(), dtype=torch.int64, device=device)
    least, most = same.clone(), same.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if os.environ.get(_VARIABLE) == NCCL:
        return f"{_VARIABLE} is {NCCL}"
    if device.type != "cuda":
        return f"one-shot all-reduces are for GPUs, got {device.type}"
    if dtype not in checks.HALF_DTYPES:
        return f"one-shot all-reduces are of float16 and bfloat16, got {dtype}"
    if ranks not in RANKS:
        return f"one-shot all-reduces are for {RANKS[0]} to {RANKS[-1]} GPUs, got {ranks}"
    return None if torch.equal(least, most) else "the ranks are on several machines"


def _machine() -> int:
    """A number that ranks of one machine share."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _map(group: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Map memory between the ranks."""
    if group.group_name not in _mapped:
        import torch.distributed._symmetric_memory as symmetric_memory

        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        capacity = ONE_SHOT_BYTES // ranks // LINE_BYTES
        memory = symmetric_memory.empty(inbox_bytes(ranks, capacity), dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(memory, group)
        memory.zero_()  # before any rank writes there: they meet before `_try`
        offset = memory.data_ptr() - handle.buffer_ptrs[rank]
        addresses = [pointer + offset for pointer in handle.buffer_ptrs]
        state = torch.tensor(STATE, dtype=torch.int32, device=device)
        _mapped[group.group_name] = memory, Inboxes(addresses, state, rank, capacity)
    _used[group.group_name] = _mapped[group.group_name][1]


def _load(group: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Have the kernels ready: who cannot compile them would let the others wait."""
    load(dtype, dist.get_world_size(group), device.index)


def _try(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Sum whole numbers, which every order of additions sums exactly, twice: by either half of an inbox."""
    capacity = _used[group.group_name].capacity
    x = torch.arange(LINE_BYTES * capacity // dtype.itemsize, device=device).remainder(64).to(dtype)
    x += dist.get_rank(group)
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    same = all(torch.equal(all_reduce(x, group), expected) for _ in range(2))
    return None if same else "a sum of whole numbers came out wrong"
