"""Reading tensors of safetensors files one at a time, or one expert of a stack.

With plain reads, not a memory map: what a map has touched counts as this process's memory until it is closed,
and opening a file anew for every tensor parses its header as often, a millisecond each in large mixtures.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kbit.format.safetensors_header import TensorInfo


def read_tensor(name: str, info: TensorInfo, device: torch.device, expert: int | None = None) -> torch.Tensor:
    """One tensor.

    Args:
        name: its name in the file.
        info: what the file's header, checked before, says of it.
        device: where it goes; for a GPU it is read into pinned memory.
        expert: index along the first dimension to read alone.

    Raises:
        ValueError: the file has become shorter than its header says.
    """
    shape, start = list(info.shape), _offsets(info.file, info.file.stat().st_mtime_ns)[name]
    if expert is not None:
        start += expert * (info.nbytes // max(1, shape.pop(0)))
    # Pinned tensors come from torch's cache of them, so there is no allocation for most reads.
    tensor = torch.empty(shape, dtype=info.dtype, pin_memory=device.type == "cuda")
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    raw = memoryview(array)
    with info.file.open("rb", buffering=0) as file:
        file.seek(start)
        done = 0
        while done < len(raw):  # Linux reads at most 2 GB at a time
            try:
                count = file.readinto(raw[done:])
            except OSError as error:
                error.filename = str(info.file)  # which only opening sets
                raise
            if not count:
                raise ValueError(f"{info.file} is truncated: {name} ends after {done} of {len(raw)} bytes.")
            done += count
    return tensor.to(device)


@lru_cache(maxsize=256)
def _offsets(path: Path, modified: int) -> dict[str, int]:
    """Where every tensor's data begins in a file whose header has been checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: 8 + length + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }
