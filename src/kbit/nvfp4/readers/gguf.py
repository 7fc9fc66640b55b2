"""NVFP4 tensors in GGUF files, read without the gguf package and without trusting the file.

A GGUF file is magic, version, counts, key-value pairs, tensor descriptions (name, sizes with the fastest
first, type, offset), then aligned data. Type 40 is NVFP4 in layout ggml. llama.cpp's converters store a
tensor's factor beside it: `blk.0.ffn_up.scale` belongs to `blk.0.ffn_up.weight`, one float32, or one for each
expert.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from kbit.nvfp4.formats import NVFP4Tensor, layouts
from kbit.nvfp4.quantize import repack_nvfp4
from kbit.nvfp4.readers.checks import (
    KNOWN,
    Stamp,
    check_global_scale,
    check_scale_bytes,
    refuse_missing,
    stamp,
)

NVFP4_TYPE = 40
_F32_TYPE = 0
_BLOCK = 64
_MAX_COUNT = 1 << 20
_MAX_STRING = 1 << 24
_STRING, _ARRAY = 8, 9
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type of a value: its bytes


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's description: `shape` has the slowest dimension first, `offset` is into the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int


def from_gguf(path: str | Path, name: str, layout: str = "nv") -> NVFP4Tensor:
    """Read one NVFP4 tensor of a GGUF file. Its header is parsed once for as long as the file is the same.

    Args:
        path: a GGUF file, version 2 or 3, little-endian.
        name: the tensor's name, such as "blk.0.ffn_down.weight".
        layout: "nv", or "ggml" for the file's own bytes.

    Returns:
        [N, K] or [E, N, K], on the CPU; codes and scales uint8.

    Raises:
        ValueError: the file is damaged, or the tensor is missing or not NVFP4.
        OSError: the file cannot be read; a FileNotFoundError says what to give.
    """
    path = Path(path)
    layouts.check_layout(layout, "from_gguf")
    refuse_missing(path, "from_gguf", "a GGUF file")
    tensors = _known_tensors(path, stamp(path))
    info = tensors.get(name)
    if info is None or info.kind != NVFP4_TYPE:
        found = "is not there" if info is None else f"has type {info.kind}"
        known = [key for key, each in tensors.items() if each.kind == NVFP4_TYPE]
        raise ValueError(
            f"{path}: tensor {name!r} {found}. NVFP4 tensors here: {', '.join(known[:3]) or 'none'}."
        )
    shape, where = info.shape, f"{path}: tensor {name!r}"
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[-1] % _BLOCK:
        raise ValueError(f"{where}: must be [N, K] or [E, N, K] with K a multiple of 64, got {shape}.")
    data = _data(path, info, layouts.codes_shape(shape, "ggml"), torch.uint8, where)
    codes, scales = layouts.to_nv(data, "ggml", shape[-1])
    check_scale_bytes(scales, where)
    factors = _factors(path, tensors, name, shape[:-2])
    return repack_nvfp4(NVFP4Tensor(codes, scales, factors, shape), layout)


def _factors(path: Path, tensors: Mapping[str, GGUFTensor], name: str, lead: tuple[int, ...]) -> torch.Tensor:
    key = name.removesuffix(".weight") + ".scale"
    info = tensors.get(key)
    if info is None:
        return torch.ones(lead, dtype=torch.float32, device="cpu")
    where = f"{path}: tensor {key!r}"
    if info.kind != _F32_TYPE or math.prod(info.shape) != math.prod(lead):
        raise ValueError(
            f"{where}: must be {math.prod(lead)} float32, got type {info.kind} and shape {info.shape}."
        )
    values = _data(path, info, lead, torch.float32, where)
    for value in values.flatten().tolist():
        check_global_scale(value, where)
    return values


def _data(
    path: Path, info: GGUFTensor, shape: tuple[int, ...], dtype: torch.dtype, where: str
) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    if info.offset + nbytes > path.stat().st_size:
        raise ValueError(
            f"{where}: {nbytes} bytes at {info.offset} end behind the file's {path.stat().st_size}. The file "
            f"is truncated; fetch it again."
        )
    raw = np.fromfile(path, np.uint8, nbytes, offset=info.offset)
    if raw.size != nbytes:
        raise ValueError(f"{where}: only {raw.size} of {nbytes} bytes were read. Is the file being written?")
    return torch.from_numpy(raw).view(dtype).view(shape)


@lru_cache(maxsize=KNOWN)
def _known_tensors(path: Path, unchanged: Stamp) -> Mapping[str, GGUFTensor]:
    return read_tensors(path)


def read_tensors(path: Path) -> dict[str, GGUFTensor]:
    """Every tensor's description.

    Raises:
        ValueError: not a GGUF file, or its header contradicts itself.
        OSError: the file cannot be read.
    """
    with path.open("rb") as stream:
        header = _Header(path, stream)
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{path}: does not begin with GGUF. Is it another format?")
        version = header.number("<I")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version must be 2 or 3 in little-endian, got {version}.")
        count, pairs = header.count("tensors"), header.count("key-value pairs")
        alignment = 32
        for _ in range(pairs):
            key, value = header.string(), header.value()
            if key == "general.alignment":
                alignment = value
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise ValueError(f"{path}: general.alignment must be a power of two >= 8, got {alignment}.")
        described = [header.tensor() for _ in range(count)]
        start = layouts.round_up(stream.tell(), alignment)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in described:
        if name in tensors or offset % alignment:
            reason = "occurs twice" if name in tensors else f"is at {offset}, not aligned to {alignment}"
            raise ValueError(f"{path}: tensor {name!r} {reason}. The file is damaged.")
        tensors[name] = GGUFTensor(shape, kind, start + offset)
    return tensors


class _Header:
    """Reads a header's fields, and refuses counts and lengths that no honest file has."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self.path, self.stream = path, stream

    def bytes(self, count: int) -> bytes:
        raw = self.stream.read(count)
        if len(raw) != count:
            raise ValueError(f"{self.path}: the header ends early. The file is truncated; fetch it again.")
        return raw

    def number(self, form: str) -> int:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def count(self, what: str, limit: int = _MAX_COUNT) -> int:
        value = self.number("<Q")
        if value > limit:
            raise ValueError(f"{self.path}: {value} {what}, the limit is {limit}. The file is damaged.")
        return value

    def string(self) -> str:
        raw = self.bytes(self.count("bytes in a string", _MAX_STRING))
        return raw.decode("utf-8", errors="replace")

    def value(self) -> Any:
        return self._typed(self.number("<I"))

    def _typed(self, kind: int) -> Any:
        """A value; None for an array, which is skipped."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.number("<I"), self.count("array elements", _MAX_STRING)
            if inner == _STRING:
                for _ in range(count):
                    self.string()
            else:
                self.bytes(self._size(inner) * count)
            return None
        raw = self.bytes(self._size(kind))
        return int.from_bytes(raw, "little") if kind not in (6, 12) else None

    def _size(self, kind: int) -> int:
        if kind not in _SCALARS:
            raise ValueError(
                f"{self.path}: a value has type {kind}, which GGUF does not have. The file is damaged."
            )
        return _SCALARS[kind]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self.string(), self.number("<I")
        if dimensions > 4:
            raise ValueError(
                f"{self.path}: tensor {name!r} must have at most 4 dimensions, got {dimensions}."
            )
        sizes = [self.count(f"elements in a dimension of {name!r}", 1 << 40) for _ in range(dimensions)]
        kind, offset = self.number("<I"), self.number("<Q")
        return name, tuple(reversed(sizes)), kind, offset
