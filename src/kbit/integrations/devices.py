"""Devices by the names that users give them, and whether other processes have theirs."""

from __future__ import annotations

import torch


def is_distributed() -> bool:
    """Whether this process is one of several that run a model together."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def find_device(name: str, known: str = "cpu, cuda or cuda:1") -> torch.device:
    """The CPU or a GPU of a name, looked for before anything is loaded for it.

    Args:
        name: such as "cpu", "cuda" (the first GPU) or "cuda:1".
        known: what to use instead, for the message about another name.

    Raises:
        ValueError: no such device, or torch does not see it.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which nothing runs on
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no device {name!r}. Use {known}.")
    if device.type == "cpu":
        return device
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        why = "" if torch.version.cuda else f", for torch {torch.__version__} is built without CUDA"
        raise ValueError(f"no device {name!r}: torch sees {count} GPUs{why}. Use another, or cpu.")
    return torch.device("cuda", index)
