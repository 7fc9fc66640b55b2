"""What is refused before a model is quantized, and what changes nothing where layers are quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from kbit.format.errors import NonFiniteWeightError
from kbit.format.policy import QuantizationPolicy
from kbit.format.words import at, counted
from kbit.nn.parts import QuantizedModule
from kbit.nn.support import has_own_forward
from kbit.ops.checks import float_dtype


def refuse_others(method: str, module: object, kind: type[nn.Module], name: str) -> None:
    """Raise TypeError unless `module` is what the constructor `method` quantizes, and is not quantized."""
    if not isinstance(module, kind) or isinstance(module, QuantizedModule):
        raise TypeError(
            f"{method}: takes an unquantized nn.{kind.__name__}, got {type(module).__name__}{at(name)}. "
            f"kbit.quantize takes tensors, kbit.quantize_model models."
        )
    if type(module).forward is not kind.forward or has_own_forward(module):
        raise TypeError(
            f"{method}: takes what computes as nn.{kind.__name__} does, got {type(module).__name__} with a "
            f"forward of its own{at(name)}, which would be lost. Leave the layer as it is."
        )


def require_policy(policy: object, what: str) -> None:
    """Raise TypeError unless a policy is one, and what its fields raise that were changed since it was made.

    `what` was given it.
    """
    if not isinstance(policy, QuantizationPolicy):
        kind = type(policy).__name__
        remedy = "For 4 bits: kbit.KbitConfig(bits=4)."
        if kind == "NVFP4Config":
            remedy = "A model gets NVFP4 layers on loading: from_pretrained(..., quantization_config=config)."
        raise TypeError(f"{what}: policy must be a KbitConfig or QuantizationPolicy, got {kind}. {remedy}")
    policy.validate()


def require_progress(progress: object, what: str) -> None:
    """Raise TypeError unless `progress` is None or can be called; `what` was given it."""
    if progress is not None and not callable(progress):
        raise TypeError(
            f"{what}: progress must be a function of (done, total, name), got {type(progress).__name__}. "
            f"Leave it out to see nothing."
        )


def refuse_weights(modules: Mapping[str, nn.Module]) -> None:
    """Raise for weights of modules that cannot be quantized, before any of them is; biases may be anything.

    Raises:
        NonFiniteWeightError: one holds NaN or Inf.
        TypeError: one is of a dtype that is not quantized.
        ValueError: one is on the meta device.
    """
    weights = {
        f"{name}.{key}": parameter
        for name, module in modules.items()
        for key, parameter in module.named_parameters(recurse=False)
        if not key.endswith("bias")
    }
    for name, weight in weights.items():
        if weight.device.type == "meta":
            raise ValueError(f"{name} is on the meta device. Load the model's weights first.")
        float_dtype("quantize_model", "w", weight.dtype, name)
    for name, weight in weights.items():
        ends = torch.stack(torch.aminmax(weight.detach())) if weight.numel() else weight
        if not torch.isfinite(ends).all():  # a pass over the weight; to count takes several
            raise NonFiniteWeightError(weight.numel() - int(torch.isfinite(weight).sum()), name)


def has_quantized(model: nn.Module) -> bool:
    """Whether any layer of a model is quantized."""
    return any(isinstance(module, QuantizedModule) for module in model.modules())


def refuse_other_format(model: nn.Module, policy: QuantizationPolicy, widths: Collection[int]) -> None:
    """Refuse new layers of these widths that a checkpoint's config cannot state beside those there are."""
    for name, layer in model.named_modules():
        if not isinstance(layer, QuantizedModule) or not widths:
            continue
        if layer.absmax_format != policy.absmax_format:
            what, has = "one absmax_format", f"{layer.absmax_format}, the policy {policy.absmax_format}"
        elif layer.bits in widths and policy.codebook_for(layer.bits).tolist() != layer.levels:
            what, has = "one codebook for each width", f"another at {layer.bits} bits than the policy"
        else:
            continue
        raise ValueError(
            f"quantize_model: a model has {what}, and {name}, quantized already, has {has}. Use "
            f"the same for all, or begin with the unquantized model."
        )


def other_settings(
    model: nn.Module, policy: QuantizationPolicy, width_of: Callable[[str], int | None]
) -> str | None:
    """Say that quantized layers stay although the policy, or `width_of` their names, says others; or None."""
    other = []
    for name, layer in model.named_modules():
        width = width_of(name) if isinstance(layer, QuantizedModule) else None
        if not isinstance(layer, QuantizedModule) or width is None:
            continue
        if width != layer.bits:
            other.append(f"{name} ({layer.bits} bits)")
        elif layer.absmax_format != policy.absmax_format:
            other.append(f"{name} (absmax_format {layer.absmax_format})")
        elif policy.codebook_for(layer.bits).tolist() != layer.levels:
            other.append(f"{name} (another codebook)")
    if not other:
        return None
    return (
        f"kbit quantized nothing: {counted(len(other), 'layer')} keep what they have, such as {other[0]}, "
        f"though the policy says others. Start from the unquantized model."
    )


def refuse_parallel(model: nn.Module, what: str) -> None:
    """Raise TypeError if the model that `what` was given is wrapped for data parallelism.

    Names in it are others than those that a policy knows, and the wrapper keeps to the parameters it found.
    """
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"{what}: model must be the one inside, got {type(model).__name__}. Call {what} with its .module "
            f"first, then wrap that."
        )


def refuse_scripted(model: nn.Module) -> None:
    """Raise TypeError if a module was made by torch.jit, whose layers nobody can replace."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"quantize_model: {name or 'the model'} was made by torch.jit, and its layers cannot be "
                f"replaced. Quantize the module that it was made from."
            )
