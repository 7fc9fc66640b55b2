"""What is refused before a model is quantized, and what changes nothing where layers are quantized."""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn

from kbit.format.policy import QuantizationPolicy
from kbit.format.words import counted
from kbit.nn.parts import QuantizedModule


def require_policy(policy: object, what: str) -> None:
    """Raise TypeError unless a policy is one; `what` was given it."""
    if not isinstance(policy, QuantizationPolicy):
        raise TypeError(
            f"{what}: policy must be a KbitConfig or QuantizationPolicy, got {type(policy).__name__}. For 4 "
            f"bits: kbit.KbitConfig(bits=4)."
        )


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


def other_bits(model: nn.Module, width_of: Callable[[str], int | None]) -> str | None:
    """Say that layers keep their bits where `width_of` their names is another one; None if all agree."""
    quantized = [(name, one) for name, one in model.named_modules() if isinstance(one, QuantizedModule)]
    other = [f"{name} ({one.bits} bits)" for name, one in quantized if width_of(name) not in (None, one.bits)]
    if not other:
        return None
    return (
        f"kbit quantized nothing: {counted(len(other), 'layer')} keep the bits that they have, such as "
        f"{other[0]}, though the policy says others. Start from the unquantized model."
    )
