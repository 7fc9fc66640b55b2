"""Reading tensors of safetensors files one at a time, or one expert of a stack.

With plain reads at the places that the header tells, not a memory map: what a map has touched counts as this
process's memory until it is closed, and the library parses a file's header anew for every tensor, which takes
a millisecond each in large mixtures.
"""

from __future__ import annotations

from typing import Any

import torch

from kbit.format.safetensors_header import TensorInfo

_COMPARED = 16 * 2**20  # bytes at a time: tables have gigabytes, and most that differ do so at once


def read_tensor(name: str, info: TensorInfo, device: torch.device, expert: int | None = None) -> torch.Tensor:
    """One tensor.

    Args:
        name: its name, for messages.
        info: what the file's header, checked before, says of it.
        device: where it goes; for a GPU it is read into pinned memory.
        expert: index along the first dimension to read alone.

    Raises:
        ValueError: the file has become shorter than its header says.
    """
    shape, start = list(info.shape), info.offset
    if expert is not None:
        start += expert * (info.nbytes // max(1, shape.pop(0)))
    # Pinned tensors come from torch's cache of them, so there is no allocation for most reads.
    tensor = torch.empty(shape, dtype=info.dtype, device="cpu", pin_memory=device.type == "cuda")
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


def are_equal(one: tuple[str, TensorInfo], other: tuple[str, TensorInfo]) -> bool:
    """Whether two tensors, (name, info), have the same dtype, shape and bits. Reads up to where they differ.

    Raises:
        ValueError: see `read_tensor`.
    """
    infos = [info for _, info in (one, other)]
    if len({(info.dtype, info.shape) for info in infos}) > 1:
        return False
    size, cpu = infos[0].nbytes, torch.device("cpu")
    for start in range(0, size, _COMPARED):
        count = min(_COMPARED, size - start)
        pieces = [
            read_tensor(name, TensorInfo(info.file, torch.uint8, (count,), info.offset + start), cpu)
            for name, info in (one, other)
        ]
        if not torch.equal(*pieces):
            return False
    return True
