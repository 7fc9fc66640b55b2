"""Sums over ranks: by the process group's collective, or for small tensors by GPUs that read each other.

Decoding adds up a few hundred kilobytes twice a layer, where latency is all that counts. In a one-shot
all-reduce every GPU puts its tensor into memory that the others have mapped, waits for theirs, and adds all
of them itself: one kernel, one crossing of the link, where NCCL's rings cross it twice. The kernel is torch's
(`torch.ops.symm_mem`), on memory of `torch.distributed._symmetric_memory`. For large tensors NCCL moves less.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# Above, reading every peer's whole tensor costs more than NCCL's latency.
ONE_SHOT_BYTES = 2**20
_ALIGNMENT = 16

# (name of a process group, dtype) -> memory that its ranks have mapped. It lives as long as the process: CUDA
# graphs hold its address.
_shared: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def all_reduce(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' `x`, the same bits on all; written over it, or into a new tensor."""
    shared = _shared.get((group.group_name, x.dtype)) if _shared else None
    if shared is None or not 0 < x.nbytes <= shared.nbytes or x.nbytes % _ALIGNMENT:
        dist.all_reduce(x, group=group)
        return x
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    mapped = shared[: x.numel()].view(x.shape)
    return torch.ops.symm_mem.one_shot_all_reduce_copy(mapped, x, "sum", group.group_name)


def use_one_shot(group: Any, dtype: torch.dtype, device: torch.device) -> str | None:
    """Have small sums of a group's ranks done by one-shot all-reduces from now on; every rank must call it.

    Args:
        group: a process group of GPUs of one machine.
        dtype: of the activations.
        device: this rank's.

    Returns:
        Why it cannot be, the same on all ranks where one fails; None if it is on.
    """
    key = group.group_name, dtype
    # Step by step, each agreed on: a rank alone in a collective would wait forever.
    for step in (_map, _try):
        reason = None
        try:
            reason = step(key, group, device)
        except (RuntimeError, ImportError, AttributeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        failed = torch.tensor([reason is not None], dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if failed.item():
            _shared.pop(key, None)
            return reason or "another rank could not"
    return None


def _map(key: tuple[str, torch.dtype], group: Any, device: torch.device) -> str | None:
    """Map memory between the ranks."""
    if device.type != "cuda":
        return f"one-shot all-reduces are for GPUs, got {device.type}"
    import torch.distributed._symmetric_memory as symmetric_memory

    dtype = key[1]
    shared = symmetric_memory.empty(ONE_SHOT_BYTES // dtype.itemsize, dtype=dtype, device=device)
    symmetric_memory.rendezvous(shared, group)
    _shared[key] = shared
    return None


def _try(key: tuple[str, torch.dtype], group: Any, device: torch.device) -> str | None:
    """Sum whole numbers, which every order of additions sums exactly."""
    x = torch.arange(len(_shared[key]), device=device).remainder(64).to(key[1]) + dist.get_rank(group)
    expected = x.clone()
    dist.all_reduce(expected, group=group)
    same = torch.equal(all_reduce(x, group), expected)
    return None if same else "a sum of whole numbers came out wrong"
