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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from kbit.backends.cuda.ranks import RANKS, STATE, Inboxes, inbox_bytes, load, one_shot
from kbit.dispatch.backends import cuda_answers
from kbit.format.words import first_line
from kbit.ops import checks
from kbit.ops.one_shot_schemas import LINE_BYTES

ALL_REDUCES = NCCL, ONE_SHOT = "nccl", "one-shot"
_VARIABLE = "KBIT_ALL_REDUCE"
_TRY_SECONDS = 10
_MOST_SECONDS = 2**31 - 1  # of a kernel's argument
_log = logging.getLogger(__name__)
# Of a tensor, times ranks: each is written to every rank, which at some size costs more than NCCL's latency.
# On two H200s 4 KiB take 2.1 us, by NCCL 12, and 1 MiB 8.3 and 20; more was not measured.
ONE_SHOT_BYTES = 2**21


class _Mapped(NamedTuple):
    """Memory of the ranks of a group, which all of them have mapped; groups may be made anew of one name."""

    group: Any
    memory: torch.Tensor
    inboxes: Inboxes


_mapped: dict[str, _Mapped] = {}  # by the group's name
_kept: list[torch.Tensor] = []  # memory lives as long as the process: CUDA graphs hold its address


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' `x`, the same bits on all; written over it, or into a new tensor."""
    inboxes = _inboxes_for(x, x.numel(), group)
    if inboxes is None:
        dist.all_reduce(x, group=group)
        return x
    return torch.ops.kbit.one_shot_sum(x, *inboxes)


def gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """[..., columns] of every rank -> [..., ranks * columns]."""
    inboxes = _inboxes_for(x, x.shape[-1], group)
    if inboxes is not None:
        return torch.ops.kbit.one_shot_gather(x, *inboxes)
    received = x.new_empty(dist.get_world_size(group), *x.shape)
    dist.all_gather_into_tensor(received, x[None].contiguous(), group=group)
    return received.movedim(0, -2).flatten(-2)


def _inboxes_for(x: torch.Tensor, whole: int, group: Any) -> Inboxes | None:
    """Where ranks put x, of which so many elements stay together; None if that is for the process group."""
    found = _mapped.get(group.group_name) if _mapped else None
    if found is None or x.dtype not in checks.HALF_DTYPES:
        return None
    if not torch.compiler.is_compiling() and found.group is not group:
        return None
    # No `nbytes`, which torch.compile does not know of sizes that vary.
    size, fits = x.element_size(), found.inboxes.state.device == x.device
    fits = fits and 0 < x.numel() * size <= LINE_BYTES * found.inboxes.capacity
    return found.inboxes if fits and whole * size % LINE_BYTES == 0 else None


def use_where_possible(model: Any) -> None:
    """`use_one_shot` for the ranks of a model that was split and loaded; every rank must call it.

    Raises:
        ValueError: KBIT_ALL_REDUCE is wrong.
    """
    for group, device in groups_of(model).items():
        if device.type == "cuda":
            reason = use_one_shot(group, model.dtype, device)
            if reason is not None:
                _log.info("sums over ranks are left to %s: %s", dist.get_backend(group), reason)
    if _asked() not in ALL_REDUCES:  # last: no rank must miss what the others do together
        known = " or ".join(ALL_REDUCES)
        raise ValueError(f"{_VARIABLE} must be {known}, got {_asked()!r}. Unset it, or set another.")


def groups_of(model: Any) -> dict[Any, torch.device]:
    """{process group: this rank's device}, of a model's split layers."""
    from kbit.integrations.transformers.parallel_layers import ParallelModule

    layers = [module for module in model.modules() if isinstance(module, ParallelModule)]
    return {layer.split.group: layer.codebook.device for layer in layers}


def _asked() -> str:
    return os.environ.get(_VARIABLE) or ONE_SHOT


def use_one_shot(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Have small sums of a group's ranks done by one-shot all-reduces from now on; every rank must call it.

    All ranks must then compute the same sums in the same order, as with NCCL, and on one stream. Loading a
    split model does this where it can; KBIT_ALL_REDUCE=nccl on any rank leaves all to the process group.

    Args:
        group: a process group of GPUs of one machine.
        dtype: of the activations.
        device: this rank's.

    Returns:
        Why it cannot be, the same on all ranks; None if it is on.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    reason = _agreed(lambda: _check(group, dtype, device), group, device)
    found = _mapped.get(group.group_name)
    if reason is not None or (found is not None and found.group is group):
        return reason
    _mapped.pop(group.group_name, None)
    made: list[torch.Tensor] = []
    # Step by step, each agreed on: a rank alone in a collective would wait forever.
    steps: tuple[Callable[[], str | None], ...] = (
        lambda: _allocate(made, group, device),
        lambda: _map(made[0], group),
        lambda: load(dist.get_world_size(group), device.index),
        lambda: _try(group, dtype),
    )
    for step in steps:
        reason = _agreed(step, group, device)
        if reason is not None:
            _mapped.pop(group.group_name, None)
            return reason
    return None


def _agreed(step: Callable[[], str | None], group: Any, device: torch.device) -> str | None:
    """Take a step; why some rank could not, on all ranks."""
    reason = None
    try:
        reason = step()
    except Exception as error:  # of whatever kind, or the other ranks would wait for this one
        reason = first_line(error)
    found: str | None = first_of(reason, group, device)
    return found


def first_of(value: Any, group: Any, device: torch.device) -> Any:
    """What the first rank of those that have something has, on all ranks, every one of which must call it.

    Args:
        value: what this rank has, which can be pickled; None if nothing.
        group: a process group.
        device: this rank's.

    Returns:
        None if no rank has anything.
    """
    found = torch.tensor([value is not None], dtype=torch.int32, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    if not found.item():
        return None
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return next(one for one in values if one is not None)


def _check(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    ranks, here = dist.get_world_size(group), torch.tensor(_machine(), dtype=torch.int64, device=device)
    least, most = here.clone(), here.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    if _asked() != ONE_SHOT:
        return f"{_VARIABLE} is {_asked()}"
    if device.type != "cuda":
        return f"one-shot all-reduces are for GPUs, got {device.type}"
    if not cuda_answers(here):
        return "one-shot all-reduces are by kbit's CUDA kernels, which do not run here"
    if dtype not in checks.HALF_DTYPES:
        return f"one-shot all-reduces are of float16 and bfloat16, got {dtype}"
    if ranks not in RANKS:
        return f"one-shot all-reduces are for {RANKS[0]} to {RANKS[-1]} GPUs, got {ranks}"
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return "NCCL_P2P_DISABLE is 1"
    return None if torch.equal(least, most) else "the ranks are on several machines"


def _machine() -> int:
    """A number that ranks of one machine share."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        name = socket.gethostname()
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _capacity(group: Any) -> int:
    return ONE_SHOT_BYTES // dist.get_world_size(group) // LINE_BYTES


def _allocate(made: list[torch.Tensor], group: Any, device: torch.device) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    size = inbox_bytes(dist.get_world_size(group), _capacity(group))
    made.append(symmetric_memory.empty(size, dtype=torch.uint8, device=device))
    _kept.extend(made)


def _map(memory: torch.Tensor, group: Any) -> None:
    """Map memory between the ranks."""
    import torch.distributed._symmetric_memory as symmetric_memory

    handle, rank = symmetric_memory.rendezvous(memory, group), dist.get_rank(group)
    memory.zero_()  # before any rank writes there: they meet before `_try`
    offset = memory.data_ptr() - handle.buffer_ptrs[rank]
    addresses = [pointer + offset for pointer in handle.buffer_ptrs]
    state = torch.tensor(STATE, dtype=torch.int32, device=memory.device)
    inboxes = Inboxes(addresses, state, rank, _capacity(group), _seconds(group, memory.device))
    _mapped[group.group_name] = _Mapped(group, memory, inboxes)


def _seconds(group: Any, device: torch.device) -> int:
    """How long a group's ranks wait for each other."""
    limit = group._get_backend(device).options._timeout
    return min(max(1, int(limit.total_seconds())), _MOST_SECONDS)


def _try(group: Any, dtype: torch.dtype) -> str | None:
    """Sum and gather whole numbers, which any order sums exactly, by both halves of an inbox."""
    inboxes, ranks = _mapped[group.group_name].inboxes, dist.get_world_size(group)
    numbers = torch.arange(LINE_BYTES * inboxes.capacity // dtype.itemsize, device=inboxes.state.device)
    x = (numbers.remainder(16) + inboxes.rank).to(dtype)
    total, every = x.clone(), x.new_empty(ranks * len(x))
    dist.all_reduce(total, group=group)
    dist.all_gather_into_tensor(every, x, group=group)
    same = []
    for gathers, expected in ((False, total), (True, every), (False, total)):
        out = torch.full_like(expected, -1)
        one_shot(x, inboxes._replace(seconds=-_TRY_SECONDS), out, gathers)
        same.append(torch.equal(out, expected))  # of every one: all ranks do the same
    if inboxes.state[2].item():
        return f"a GPU did not see what another wrote into its memory within {_TRY_SECONDS} seconds"
    return None if all(same) else "a sum of whole numbers came out wrong"
