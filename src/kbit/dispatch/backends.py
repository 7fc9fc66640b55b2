"""The backends in order of preference, and the legality of each: may it take this problem, and if not, why.

`KBIT_BACKEND=cuda`, `cpu` or `reference` forces one; where that one may not take a problem, the error says
why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from kbit.backends import cpu, cuda, environment, reference
from kbit.backends.dtype_codes import ABSMAX_DTYPES
from kbit.ops import forms


@dataclass(frozen=True)
class Backend:
    """A module of op implementations, and the function that says which problems it may take.

    `legal(op, device, absmax_dtype)` returns None where it may, else the reason why not.
    """

    name: str
    module: ModuleType
    legal: Callable[[str, torch.device, torch.dtype], str | None]


def _refusal(
    module: ModuleType, kind: str, op: str, device: torch.device, absmax_dtype: torch.dtype
) -> str | None:
    """Why a backend of kernels, for devices of a kind ("CPU" or "CUDA"), may not take a problem, or None."""
    if device.type != kind.lower():
        return f"the {kind} kernels need {kind} tensors, got {device}"
    reason = module.unavailable_reason(device.index)
    if reason is not None:
        return reason
    if not hasattr(module, op):
        return f"the {kind} kernels have no {op}"
    if absmax_dtype not in ABSMAX_DTYPES:
        return f"the {kind} kernels know no block scales of {absmax_dtype}"
    if op == "quantize" and absmax_dtype != torch.uint8:
        return f"the {kind} kernels quantize with E4M4 scales only, got {absmax_dtype}"
    return None


_cuda_legal, _cpu_legal = partial(_refusal, cuda, "CUDA"), partial(_refusal, cpu, "CPU")

backends: tuple[Backend, ...] = (
    Backend("cuda", cuda, _cuda_legal),
    Backend("cpu", cpu, _cpu_legal),
    Backend("reference", reference, lambda op, device, absmax_dtype: None),
)

_warned: set[str] = set()


def backend_for(op: str, device: torch.device, absmax_dtype: torch.dtype) -> Backend:
    """The backend that answers `op`.

    Raises:
        ValueError: KBIT_BACKEND names none, or one that may not take this problem.
    """
    forced = environment.backend()
    if forced:
        return _forced(forced, op, device, absmax_dtype)
    for backend in backends:
        if backend.name not in (device.type, "reference"):
            continue  # its kernels are for another device, which `legal` would say in words
        if backend.legal(op, device, absmax_dtype) is None:
            if backend.name == "reference":
                _say_once_that_kernels_are_missing(device)
            return backend
    raise AssertionError("the reference backend takes every problem")


def module_on_gpus(op: str, device: torch.device) -> ModuleType:
    """The module that answers an op without CPU kernels; there PyTorch's operators serve, whatever is forced.

    Raises:
        ValueError: as `backend_for`.
    """
    return backend_for(op, device, torch.uint8).module if device.type == "cuda" else reference


def cuda_answers(tensor: torch.Tensor) -> bool:
    """Whether the CUDA kernels answer ops on a tensor: `backend_for`, but quicker."""
    if not tensor.is_cuda or environment.backend() not in (None, "cuda"):
        return False
    return cuda.unavailable_reason(tensor.device.index) is None


def _forced(name: str, op: str, device: torch.device, absmax_dtype: torch.dtype) -> Backend:
    for backend in backends:
        if backend.name == name:
            reason = backend.legal(op, device, absmax_dtype)
            if reason is not None:
                raise ValueError(f"KBIT_BACKEND={name} cannot run {op}: {reason}. Unset it, or set another.")
            return backend
    known = ", ".join(backend.name for backend in backends)
    raise ValueError(f"KBIT_BACKEND is {name!r}; known: {known}.")


def _say_once_that_kernels_are_missing(device: torch.device) -> None:
    kernels = {"cpu": ("CPU", cpu), "cuda": ("CUDA", cuda)}.get(device.type)
    if kernels is None or device.type in _warned:
        return
    name, module = kernels
    reason = module.unavailable_reason(device.index)
    if reason is None:
        return
    _warned.add(device.type)
    warnings.warn(
        f"kbit runs on its reference backend, many times slower than its {name} kernels: {reason}. "
        f"`kbit doctor` says what to do.",
        stacklevel=2,
    )


def tiles_pay(op: str, device: torch.device) -> bool:
    """Whether `op` ("linear", "grouped_linear") has a kernel that multiplies tiles on a device."""
    if device.type != "cuda" or environment.backend() not in (None, "cuda"):
        return False
    return _cuda_legal(f"{op}_tiled", device, torch.uint8) is None


forms.set_rule(tiles_pay)
