"""Which tensors of a checkpoint are NVFP4 weights, from its headers: three libraries call them differently.

* kbit: `q_proj.weight_codes` or `experts.down_codes`, and so `..._scales` and `..._global_scale`.
* ModelOpt: `q_proj.weight`, `weight_scale`, `weight_scale_2`.
* compressed-tensors: `q_proj.weight_packed`, `weight_scale`, `weight_global_scale`, which is divided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from kbit.format.safetensors_header import TensorInfo
from kbit.nvfp4.formats import layouts
from kbit.nvfp4.formats.names import PARTS

KBIT = "kbit_nvfp4"  # also what such a model's config says
# Who writes them, and the ends of a weight's three tensors.
SPELLINGS = {
    KBIT: PARTS,
    "modelopt": (".weight", ".weight_scale", ".weight_scale_2"),
    "compressed-tensors": (".weight_packed", ".weight_scale", ".weight_global_scale"),
}
# Beside weights of the others: factors for quantizing activations.
_ACTIVATIONS = {
    KBIT: (),
    "modelopt": (".input_scale",),
    "compressed-tensors": (".input_global_scale",),
}


@dataclass(frozen=True)
class StoredWeight:
    """An NVFP4 weight in a checkpoint's files.

    Attributes:
        spelling: a key of `SPELLINGS`.
        weight: the parameter: "...q_proj.weight", or of kbit's experts "...experts.down_proj".
        codes, scales, factor: names of its tensors.
        others: names of tensors beside them that are for activations.
        shape: [N, K] or [E, N, K], K rounded up to 16.
    """

    spelling: str
    weight: str
    codes: str
    scales: str
    factor: str
    others: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all of them."""
        return (self.codes, self.scales, self.factor, *self.others)


def stored_weights(index: Mapping[str, TensorInfo]) -> list[StoredWeight]:
    """The NVFP4 weights of a checkpoint, in the order of its files.

    Args:
        index: see `kbit.format.model_files.read_index`.

    Raises:
        ValueError: a weight lacks a part, or its parts do not fit together.
    """
    found = {}
    for name in index:
        for spelling, ends in SPELLINGS.items():
            end = next((end for end in ends if name.endswith(end)), None)
            stem = name.removesuffix(end or "")
            present = [stem + each in index for each in ends]
            # Other formats have a weight and a scale, too; none has codes and scales, or such a factor.
            if end is not None and (sum(present) >= 2 if spelling == KBIT else present[2]):
                if stem not in found:
                    found[stem] = _stored(stem, spelling, index)
                break
    return list(found.values())


def _stored(stem: str, spelling: str, index: Mapping[str, TensorInfo]) -> StoredWeight:
    codes, scales, factor = (stem + end for end in SPELLINGS[spelling])
    names = (codes, scales, factor)
    known = next(name for name in names if name in index)
    for name in names:
        if name not in index:
            raise ValueError(
                f"{index[known].file}: tensor {known!r} has no {name!r} beside it. The checkpoint is "
                f"incomplete; fetch or quantize it again."
            )
    *lead, groups = index[scales].shape or (0,)
    expected = (*lead, groups * layouts.SUB_BLOCK // 2)
    if index[codes].dtype != torch.uint8 or index[codes].shape != expected:
        raise ValueError(
            f"{index[codes].file}: tensor {codes!r} must be uint8 {expected} beside block scales "
            f"{index[scales].shape}, got {index[codes].dtype} {index[codes].shape}. The file is not NVFP4."
        )
    if index[scales].dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise ValueError(
            f"{index[scales].file}: tensor {scales!r} must be float8_e4m3fn, or its bytes, got "
            f"{index[scales].dtype}. The file is not NVFP4."
        )
    if not index[factor].dtype.is_floating_point or index[factor].numel not in (1, prod(lead[:-1])):
        raise ValueError(
            f"{index[factor].file}: tensor {factor!r} must be one floating-point number for each matrix of "
            f"{codes!r}, got {index[factor].dtype} {index[factor].shape}. The file is not NVFP4."
        )
    weight = f"{stem}.weight" if spelling != KBIT else stem
    if spelling == KBIT and not stem.endswith("weight"):
        weight = f"{stem}_proj"
    others = tuple(stem + end for end in _ACTIVATIONS[spelling] if stem + end in index)
    return StoredWeight(spelling, weight, codes, scales, factor, others, (*lead, groups * layouts.SUB_BLOCK))
