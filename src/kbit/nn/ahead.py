"""Compiling a model's kernels before its first step, which would otherwise wait for one after the other."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from kbit.backends.cuda import (
    ahead,
    attention,
    delta_rule,
    driver,
    gated_delta,
    latent,
    latent_prompts,
    operands,
    tables,
)
from kbit.backends.cuda.ahead import Product
from kbit.backends.cuda.compiler import KernelSpec, compile_many, cubin_folder, folder_problem
from kbit.format.names import ABSMAX
from kbit.format.symmetry import is_symmetric
from kbit.nn.attention_layers import LATENT_LAYERS, LAYERS
from kbit.nn.delta_families import layout_of
from kbit.nn.experts import KbitExperts
from kbit.nn.merged import Merged, MergedMLP, are_joined
from kbit.nn.parts import QuantizedModule
from kbit.nn.router import FusedRouter, SharedGate
from kbit.nn.shared_expert import MergedExperts
from kbit.nn.tiling import TileableModule
from kbit.ops import checks, forms


@runtime_checkable
class KnowsKernels(Protocol):
    """A layer of a format whose kernels do not depend on the layers beside it."""

    def kernels_ahead(
        self, tokens: Sequence[int], dtype: torch.dtype, device: driver.DeviceLimits
    ) -> list[KernelSpec]:
        """The kernels that this layer uses for so many tokens on a GPU with such limits."""
        ...


def compile_kernels(
    model: nn.Module,
    tokens: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Compile the CUDA kernels that a model on a GPU will use, on all cores, into the cache of kernels.

    A kernel is compiled at its first use otherwise, in a second or two, and a model has some tens of them for
    different numbers of tokens. Kernels in the cache take no time. Without effect for layers on a CPU, and
    where the cache cannot keep anything.

    Args:
        model: quantized, where it will run.
        tokens: one or more numbers of tokens of a step, of all its sequences; by default from 1 to 16384.
        dtype: of the activations; by default that of the model's first 16-bit parameter, else bfloat16.
        progress: called after each kernel with how many are done, how many there are, and its name.

    Returns:
        How many kernels were compiled.

    Raises:
        KbitError: a kernel cannot be compiled.
        TypeError: the model is no module, a number of tokens no whole number, or the dtype is none that
            kernels compute in.
        ValueError: a number of tokens is below 1, or KBIT_KERNEL is wrong.

    >>> kbit.compile_kernels(model, tokens=[1, 128])
    0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"compile_kernels: model must be an nn.Module, got {type(model).__name__}. Load or quantize it "
            f"first."
        )
    numbers = ahead.ROWS if tokens is None else _numbers_of_tokens(tokens)
    if dtype is not None:
        checks.float_dtype("compile_kernels", "dtype", dtype)
    own = (one.dtype for name, one in model.named_parameters() if not name.endswith(ABSMAX))
    dtype = dtype or next((each for each in own if each in operands.DTYPES), torch.bfloat16)
    wanted = {
        (spec, driver.device_arch(device.index)): None
        for device in _gpus(model)
        for spec in _kernels(model, device, numbers, dtype)
    }
    if not wanted or folder_problem(cubin_folder()) is not None:
        return 0
    done = itertools.count(1)

    def tell(spec: KernelSpec, *_: object) -> None:
        if progress is not None:
            progress(next(done), len(wanted), spec.name)

    compiled = 0
    for outcome in compile_many(wanted, on_done=tell):
        if isinstance(outcome, ValueError):
            raise outcome
        compiled += not outcome.cached
    return compiled


def _numbers_of_tokens(tokens: Any) -> Sequence[int]:
    try:
        numbers = [operator.index(one) for one in (tokens if isinstance(tokens, Iterable) else (tokens,))]
    except TypeError:
        raise TypeError(
            f"compile_kernels: tokens must be a whole number or a list of them, got {tokens!r:.80}. For "
            f"example: tokens=[1, 128]."
        ) from None
    if not numbers or min(numbers) < 1:
        raise ValueError(
            f"compile_kernels: tokens must be numbers from 1 on, got {tokens!r:.80}. Leave them out for "
            f"all that are usual."
        )
    return numbers


def _kernels(
    model: nn.Module, device: torch.device, tokens: Sequence[int], dtype: torch.dtype
) -> Iterator[KernelSpec]:
    """Those of a model's layers on a device, some more than once."""
    limits = driver.device_limits(device.index)
    for layer in model.modules():
        here = isinstance(layer, TileableModule) and device in map(layer._device_of, layer.shapes)
        if here and isinstance(layer, KnowsKernels):
            yield from layer.kernels_ahead(tokens, dtype, limits)
    if not any(_weights(model, device)):
        return
    yield from ahead.kernels(
        products(model, device),
        tokens,
        dtype,
        limits,
        tables.for_device(device.index),
        {layer.bits for layer, name in _weights(model, device) if layer._held(name) is None},
        _of_attention(model, limits),
    )


def _of_attention(model: nn.Module, device: driver.DeviceLimits) -> list[KernelSpec]:
    """Those that steps of attention run, of the kinds that the model has."""
    found = []
    if layouts := {layout for module in model.modules() if (layout := layout_of(module)) is not None}:
        ratios = {ratio for _, ratio in layouts}
        found += [*gated_delta.specs(device.arch, layouts), *delta_rule.specs(device.shared_bytes, ratios)]
    if any(module._modules.keys() >= LATENT_LAYERS for module in model.modules()):
        found += [*latent.specs(device.shared_bytes), *latent_prompts.specs()]
    layers = (module for module in model.modules() if module._modules.keys() >= LAYERS)
    columns = {vars(layer).get("head_dim", 0): None for layer in layers}
    found += attention.specs(device.arch, device.shared_bytes, columns)
    return found


def _gpus(model: nn.Module) -> list[torch.device]:
    """The GPUs whose kernels multiply layers of a model."""
    layers = (module for module in model.modules() if isinstance(module, TileableModule))
    devices = {layer._device_of(name) for layer in layers for name in layer.shapes}
    return [one for one in devices if one.type == "cuda" and forms.tiles_pay("linear", one, torch.uint8)]


def _weights(model: nn.Module, device: torch.device) -> Iterator[tuple[QuantizedModule, str]]:
    """Quantized layers with the names of their weights, of those that are on a device."""
    for layer in model.modules():
        if isinstance(layer, QuantizedModule):
            for name in layer.shapes:
                if layer._device_of(name) == device:
                    yield layer, name


def products(model: nn.Module, device: torch.device) -> Iterator[Product]:
    """The products by weights in tiles on a device, as a model's modules compute them without gradients."""
    shared = set[nn.Module]()  # experts that run with a shared one where tokens are few
    merged = set[nn.Module]()
    slots = 0  # a model's routers choose as many experts each
    for module in model.modules():
        if isinstance(module, FusedRouter) and not isinstance(module, SharedGate):
            slots = module.top_k
        elif isinstance(module, MergedExperts) and module.factors is not None:
            shared.update(child for child in module.children() if isinstance(child, KbitExperts))
        elif isinstance(module, Merged):
            for group in module.siblings():
                layers = group.layers
                if are_joined(group) and group.tiles[0].device == device:
                    merged.update(layers)
                    rows, gated = sum(layer.out_features for layer in layers), isinstance(module, MergedMLP)
                    first = layers[0]
                    symmetric = is_symmetric(first.codebook)
                    yield Product(rows, first.in_features, first.bits, gated, symmetric=symmetric)
    for layer, name in _weights(model, device):
        beside = layer.is_tied and layer._tiles_pay(device)  # see kbit.nn.tied
        if layer in merged or (layer._held(name) is None and not beside):
            continue
        *count, rows, columns = layer.shapes[name]
        symmetric = is_symmetric(layer.codebook)
        if not isinstance(layer, KbitExperts):
            yield Product(rows, columns, layer.bits, symmetric=symmetric)
            continue
        gated = name == "gate_up_proj" and layer.is_fused
        for more in range(1 + (layer in shared)):
            experts, chosen = count[0] + more, slots and slots + more
            yield Product(rows, columns, layer.bits, gated, experts, chosen, symmetric)
