"""Reading a safetensors header without trusting it.

A file is 8 bytes of little-endian header length, that many bytes of JSON, and one buffer of data. The JSON
maps each tensor's name to its dtype, shape and byte range in the buffer. Nothing here reads a tensor's data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kbit.format.strict_json import parse_json

# The cap of the safetensors library. A larger length is a mistake or an attack.
MAX_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorInfo:
    """What a header says about a tensor.

    Attributes:
        file: the file it is in.
        dtype: its dtype.
        shape: its shape.
        offset: of its data, in bytes from the beginning of the file.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.numel * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check one file's header.

    Args:
        path: a safetensors file.

    Returns:
        {tensor name: TensorInfo}, in the order of the data.

    Raises:
        ValueError: not a safetensors file, truncated, or its header contradicts itself or the file's size.
        OSError: the file cannot be read.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        length = _header_length(path, size, start)
        raw = stream.read(length)
    entries = _parse_json(path, raw)
    ranges = []
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            _check_metadata(path, entry)
            continue
        if not name.isprintable():  # which a terminal would obey
            raise ValueError(f"{path}: the tensor name {name!r:.80} has characters that cannot be printed.")
        info, begin, end = _parse_entry(path, name, entry, 8 + length)
        ranges.append((begin, end, name))
        tensors[name] = info
    ranges.sort()
    _check_ranges(path, ranges, size - 8 - length)
    return {name: tensors[name] for _, _, name in ranges}


def _header_length(path: Path, size: int, start: bytes) -> int:
    if size < 8:
        raise ValueError(
            f"{path}: a safetensors file has at least 8 bytes, this one has {size}. "
            f"It is truncated; fetch it again."
        )
    length = int.from_bytes(start, "little")
    if length < 2 or length > MAX_HEADER_BYTES or length > size - 8:
        # Only now: a lawful length may begin with these bytes too.
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise ValueError(
                f"{path}: this is a pickle, not a safetensors file. Loading a pickle runs code from it, so "
                f"kbit refuses; convert the model with save_pretrained."
            )
        raise ValueError(
            f"{path}: the header says it has {length} bytes, the file has {size - 8} after the length and "
            f"headers end at {MAX_HEADER_BYTES}. The file is truncated or not safetensors; fetch it again."
        )
    return length


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        entries = parse_json(raw)
    except ValueError as error:
        raise ValueError(f"{path}: the header is not valid JSON ({error}). Fetch the file again.") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: the header must be a JSON object, got {type(entries).__name__}.")
    return entries


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ must map strings to strings.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse_entry(path: Path, name: str, entry: Any, start: int) -> tuple[TensorInfo, int, int]:
    """(what the header says, first and last byte) of a tensor; bytes count from the buffer, at `start`."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: needs dtype, shape and data_offsets, got {str(entry)[:80]}.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {sorted(DTYPES)}, got {str(dtype)[:40]!r}.")
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise ValueError(f"{where}: shape must be at most 8 sizes >= 0, got {str(shape)[:80]}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise ValueError(f"{where}: data_offsets must be [begin, end], got {str(offsets)[:80]}.")
    begin, end = offsets
    info = TensorInfo(path, DTYPES[dtype], tuple(shape), start + begin)
    if end - begin != info.nbytes:
        raise ValueError(
            f"{where}: {dtype} of shape {shape} has {info.nbytes} bytes, data_offsets {offsets} span "
            f"{end - begin}. The header contradicts itself; fetch the file again."
        )
    # Beside a size of 0 the others take no bytes, but strides follow from them all the same.
    if not _is_count(math.prod(max(1, size) for size in shape)):
        raise ValueError(
            f"{where}: shape {str(shape)[:80]} is too large for any tensor. The file is damaged."
        )
    return info, begin, end


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], buffer_bytes: int) -> None:
    """The byte ranges, sorted, must tile the buffer: no overlap, no hole, nothing outside."""
    position = 0
    for begin, end, name in ranges:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise ValueError(
                f"{path}: tensor {name!r} begins at byte {begin} of the data, expected {position}: it {kind}."
            )
        position = end
    if position != buffer_bytes:
        raise ValueError(
            f"{path}: the header describes {position} bytes of data, the file holds {buffer_bytes}. "
            f"The file is truncated or has data appended; fetch it again."
        )
