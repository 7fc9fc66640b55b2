"""dequantize_model: give a quantized model 16-bit layers again, in place and layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from kbit.nn.embedding import KbitEmbedding
from kbit.nn.experts import KbitExperts
from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.linear import KbitLinear
from kbit.nn.mixins import take_out
from kbit.nn.parts import QuantizedModule
from kbit.nn.refusals import refuse_parallel, require_progress
from kbit.nn.replace import Progress
from kbit.nn.support import keep_device_hook, keep_hooks
from kbit.nn.tiling import TileableModule
from kbit.nn.unwrap import unwrapped

# Called after a model was dequantized in place; see `kbit.nn.replace.after_quantizing`.
after_dequantizing: list[Callable[[nn.Module], None]] = []


@torch.inference_mode(False)  # gradients may be asked for later
@torch.no_grad()
def dequantize_model(
    model: nn.Module, dtype: torch.dtype | None = None, progress: Progress | None = None
) -> nn.Module:
    """Replace quantized layers by ones of the kind they replaced, with the weights they decode to, in place.

    The quantization error stays: the model computes what the quantized one did, up to rounding of `dtype`.
    Codes of a layer are freed as soon as its weight exists. Layers that share codes (a tied output head)
    share the weight; biases and hooks on calls stay. New weights require gradients, as those of any layer.

    Args:
        model: any nn.Module that holds quantized layers, or what torch.compile made of one; not itself one.
        dtype: of the weights, and of all else that is stored in the dtype of most parameters, so that the
            model still runs; by default that of its first floating-point parameter, or PyTorch's if it has
            none, and all else stays.
        progress: called as progress(done, total, name) after each layer.

    Returns:
        The model.

    Raises:
        TypeError: the model is none, or wrapped for data parallelism, dtype is no floating-point dtype, or
            `progress` no function.
        ValueError: the model itself is a layer, is split over ranks or has weights elsewhere; an adapter is
            on a layer; its layers are in NVFP4; or experts were not made from others, so that it is not known
            what they replaced. Nothing is replaced then.

    >>> kbit.dequantize_model(model, torch.bfloat16)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"dequantize_model: model must be an nn.Module, got {type(model).__name__}.")
    given, model = model, unwrapped(model)
    refuse_parallel(model, "dequantize_model")
    if isinstance(model, QuantizedModule):
        raise ValueError(
            "dequantize_model replaces layers inside a model; this model is one layer itself. Use its "
            "method dequantize."
        )
    before = None if dtype is None else _usual_dtype(model)
    dtype = _first_dtype(model) if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dequantize_model: dtype must be a floating-point torch.dtype, got {dtype!r}.")
    require_progress(progress, "dequantize_model")
    names, done = _layers(model), 0
    groups: dict[int, list[list[str]]] = {}  # by the codes that layers share
    for members in names:
        groups.setdefault(id(_codes(model.get_submodule(members[0]))), []).append(members)
    for group in groups.values():
        _replace(model, group, dtype)
        for members in group:
            done += 1
            if progress is not None:
                progress(done, len(names), members[0])
    take_out(model)
    if names and before is not None:
        _convert_others(model, before, dtype)
    for tell in after_dequantizing:
        tell(model)
    return given


def _replace(model: nn.Module, group: list[list[str]], dtype: torch.dtype) -> None:
    """Replace the layers that share codes, by ones that share a weight."""
    weight: nn.Parameter | None = None
    for members in group:
        layer = model.get_submodule(members[0])
        assert isinstance(layer, QuantizedModule)
        plain = _plain(layer, dtype, weight)
        if len(group) > 1 and isinstance(plain.weight, nn.Parameter):
            weight = plain.weight
        for name in members:
            model.set_submodule(name, plain)


def _of_the_model(model: nn.Module) -> list[nn.Parameter]:
    """Its floating-point parameters but block scales and factors, which have a dtype of their own."""
    parts = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, TileableModule)
        for name, parameter in module._parameters.items()
        if parameter is not None and name.startswith(tuple(f"{weight}_" for weight in module.shapes))
    }
    return [p for p in model.parameters() if p.is_floating_point() and id(p) not in parts]


def _first_dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in _of_the_model(model)), torch.get_default_dtype())


def _usual_dtype(model: nn.Module) -> torch.dtype | None:
    """That of most elements; the first parameter may be one of few that are kept in float32."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in _of_the_model(model):
        elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else None


def _convert_others(model: nn.Module, before: torch.dtype, dtype: torch.dtype) -> None:
    """What has another dtype than the model on purpose, such as a router's bias in float32, keeps it.

    So do buffers that are not stored, such as frequencies of rotary embeddings, which were never the model's.
    """
    for module in model.modules():
        if isinstance(module, TileableModule):  # of another format, whose factors have a dtype of their own
            continue
        stored = [
            buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        ]
        for tensor in (*module._parameters.values(), *stored):
            if tensor is not None and tensor.dtype == before:
                # One of inference mode stays one: with the data of another it could be read in no mode.
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.data = tensor.data.to(dtype)


def _layers(model: nn.Module) -> list[list[str]]:
    """The names of every quantized layer.

    Raises:
        ValueError: one cannot be replaced.
    """
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = getattr(module, "base_layer", None)
        if isinstance(inside, QuantizedModule):
            raise ValueError(
                f"dequantize_model: {name} is an adapter on a quantized layer, which it needs. Merge it or "
                f"take it off first (kbit.integrations.peft.merge, or unload of the peft model)."
            )
        if not isinstance(module, QuantizedModule):
            continue
        if type(module) not in (KbitLinear, KbitEmbedding, KbitExperts):
            raise ValueError(
                f"dequantize_model: {name} is a {type(module).__name__}, as in models that are split over "
                f"ranks. Save the model, and dequantize it in one process."
            )
        if isinstance(module, KbitExperts) and module.replaced is None:
            raise ValueError(
                f"dequantize_model: {name} was not made from experts, so what it stands for is not known. "
                f"Its method dequantize gives both weights."
            )
        if any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"dequantize_model: the weight of {name} is on the meta device. Load it, or have accelerate "
                f"give it back (remove_hook_from_submodules)."
            )
        found.setdefault(id(module), []).append(name)
    if not found:
        _refuse_other_formats(model)
    return list(found.values())


def _refuse_other_formats(model: nn.Module) -> None:
    """Refuse a model whose quantized layers are all of a format that has no way back here."""
    for name, module in model.named_modules():
        if isinstance(module, TileableModule):
            raise ValueError(
                f"dequantize_model: {name or 'the model'} is a {type(module).__name__}, not a k-bit "
                f"layer. Load the unquantized model; "
                f"kbit.nvfp4.dequantize_nvfp4(layer.quantized(name)) gives single weights."
            )


def _codes(layer: nn.Module) -> object:
    """What layers that share a weight have in common."""
    packed = layer._parameters.get("weight_packed")
    return layer if packed is None else packed


def _plain(layer: QuantizedModule, dtype: torch.dtype, weight: nn.Parameter | None) -> nn.Module:
    """The layer that a quantized one stands for, with its weight or with one decoded already."""
    plain: nn.Module
    decoded = torch.float32 if dtype == torch.float64 else dtype
    if isinstance(layer, KbitExperts):
        assert layer.replaced is not None
        plain = layer.replaced.again()
        for name in WEIGHTS:
            plain._parameters[name] = nn.Parameter(layer.dequantize(name, decoded).to(dtype))
    else:
        assert isinstance(layer, KbitLinear | KbitEmbedding)
        if isinstance(layer, KbitLinear):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
            plain.register_parameter("bias", layer.bias)
        else:
            size = layer.num_embeddings, layer.embedding_dim
            plain = nn.Embedding(*size, layer.padding_idx, device="meta")
        plain.weight = nn.Parameter(layer.dequantize(decoded).to(dtype)) if weight is None else weight
    plain.train(layer.training)
    keep_hooks(layer, plain)
    keep_device_hook(layer, plain)
    return plain
