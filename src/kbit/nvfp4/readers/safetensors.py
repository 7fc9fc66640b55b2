"""NVFP4 matrices in safetensors files, as ModelOpt and compressed-tensors write them.

Both store layout nv: e2m1 codes uint8 [N, K / 2] and block scales float8_e4m3fn [N, K / 16].
 * ModelOpt: `weight`, `weight_scale`, and `weight_scale_2` float32, the factor amax / 2688.
 * compressed-tensors: `weight_packed`, `weight_scale`, and `weight_global_scale` float32, its reciprocal. We
   keep the correctly rounded reciprocal, so decoded values may differ from its own by one unit in the last
   place.

A checkpoint's headers are parsed once for as long as its files are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open

from kbit.format.model_files import read_index
from kbit.format.names import ABSMAX
from kbit.format.safetensors_header import TensorInfo, read_header
from kbit.nvfp4.formats import NVFP4Tensor
from kbit.nvfp4.formats.names import CODES
from kbit.nvfp4.readers.checks import (
    KNOWN,
    Stamp,
    check_global_scale,
    check_scale_bytes,
    refuse_missing,
    stamp,
)

_KIND = "a safetensors file or a model folder"


def from_modelopt(path: str | Path, name: str) -> NVFP4Tensor:
    """Read one linear layer's weight from a ModelOpt checkpoint.

    Args:
        path: a safetensors file or a model folder.
        name: the module's name, such as "model.layers.0.mlp.down_proj".

    Returns:
        [N, K] in layout nv, on the CPU; codes and scales uint8.

    Raises:
        ValueError: the file is damaged, or the tensors are missing or not what the format says.
        OSError: the file cannot be read; a FileNotFoundError says what to give.
    """
    refuse_missing(Path(path), "from_modelopt", _KIND)
    codes, scales, factor = _read(Path(path), name, "weight", "weight_scale_2")
    return _assemble(codes, scales, factor, f"{path}: {name}")


def from_compressed_tensors(path: str | Path, name: str) -> NVFP4Tensor:
    """Read one linear layer's weight from a compressed-tensors checkpoint (format nvfp4-pack-quantized).

    Args:
        path: a safetensors file or a model folder.
        name: the module's name, such as "model.layers.0.mlp.down_proj".

    Returns:
        [N, K] in layout nv, on the CPU; codes and scales uint8.

    Raises:
        ValueError: the file is damaged, or the tensors are missing or not what the format says.
        OSError: the file cannot be read; a FileNotFoundError says what to give.
    """
    refuse_missing(Path(path), "from_compressed_tensors", _KIND)
    where = f"{path}: {name}"
    codes, scales, divisor = _read(Path(path), name, "weight_packed", "weight_global_scale")
    check_global_scale(float(divisor), f"{where}.weight_global_scale")
    return _assemble(codes, scales, torch.ones_like(divisor) / divisor, where)


def _read(path: Path, name: str, codes: str, factor: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three tensors of a layer, after their headers have been checked."""
    # Of a link to a missing shard `read_index` tells.
    files = [file for file in path.glob("*.safetensors*") if file.is_file()] if path.is_dir() else [path]
    index = _known_index(path, tuple(sorted(map(stamp, files))))
    keys = [f"{name}.{part}" for part in (codes, "weight_scale", factor)]
    for key in keys:
        if key not in index:
            layers = (n.removesuffix(f".{factor}") for n in index if n.endswith(f".{factor}"))
            known = sorted(layer for layer in layers if f"{layer}.{codes}" in index)
            here = f"{', '.join(known[:3])}." if known else f"none.{_hint(index)}"
            raise ValueError(f"{path}: has no tensor {key!r}. NVFP4 layers here: {here}")
    first, second, third = (index[key] for key in keys)
    _check_header(first, second, third, f"{path}: {name}")
    return _load(first, keys[0]), _load(second, keys[1]), _load(third, keys[2])


def _hint(index: Mapping[str, TensorInfo]) -> str:
    """Which reader a file without such layers is for, by names that only one library has."""
    if any(name.endswith(ABSMAX) for name in index):
        return " The file has k-bit codes, which transformers loads."
    if any(name.endswith(CODES) for name in index):
        return " The file is kbit's own, which transformers loads."
    for end, reader in ((".weight_scale_2", from_modelopt), (".weight_packed", from_compressed_tensors)):
        if any(name.endswith(end) for name in index):
            return f" The file is one for {reader.__name__}."
    return ""


@lru_cache(maxsize=KNOWN)
def _known_index(path: Path, unchanged: tuple[Stamp, ...]) -> Mapping[str, TensorInfo]:
    return read_index(path) if path.is_dir() else read_header(path)


def _check_header(codes: TensorInfo, scales: TensorInfo, factor: TensorInfo, where: str) -> None:
    if codes.dtype != torch.uint8 or len(codes.shape) != 2 or 0 in codes.shape:
        raise ValueError(f"{where}: codes must be uint8 [N, K / 2], got {codes.dtype} {codes.shape}.")
    rows, half = codes.shape
    if half % 8:
        raise ValueError(f"{where}: K must be a multiple of 16, got {2 * half}. The file is not NVFP4.")
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8) or scales.shape != (rows, half // 8):
        raise ValueError(
            f"{where}.weight_scale: must be float8_e4m3fn ({rows}, {half // 8}), got {scales.dtype} "
            f"{scales.shape}. Swizzled scales must be stored unswizzled."
        )
    if factor.dtype != torch.float32 or factor.numel != 1:
        raise ValueError(
            f"{where}: the tensor's scale must be one float32, got {factor.dtype} {factor.shape}."
        )


def _load(info: TensorInfo, key: str) -> torch.Tensor:
    with safe_open(info.file, framework="pt") as file:
        return file.get_tensor(key)


def _assemble(codes: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor, where: str) -> NVFP4Tensor:
    byte = scales.view(torch.uint8)
    check_scale_bytes(byte, f"{where}.weight_scale")
    check_global_scale(float(factor), where)
    return NVFP4Tensor(codes, byte, factor.reshape(()), (codes.shape[0], 2 * codes.shape[1]))
