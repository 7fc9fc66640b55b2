"""What of a loaded model stayed in 16 bits: one warning that names every large parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from kbit.format.names import all_names, holder_of, module_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.ties import why_kept
from kbit.format.words import counted
from kbit.integrations.transformers.names import loading_transforms, parameter_of
from kbit.integrations.transformers.tied_modules import tied_modules
from kbit.nn import leftovers
from kbit.nn.support import left_alone, unsupported
from kbit.nn.tiling import TileableModule

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def reasons_in_model(model: Any, policy: QuantizationPolicy, tensors: Iterable[str]) -> dict[str, str]:
    """Why tensors of a quantized checkpoint stayed as they are: {tensor: reason}, where it is known.

    The names in the files do not always say it: a skip may be by the name that the model has for a module,
    or the module may be of a kind that is never quantized.

    Args:
        model: a PreTrainedModel of the checkpoint's config, on the meta device and not changed.
        policy: the checkpoint's.
        tensors: names in its files.
    """
    transforms, state, alone = loading_transforms(model), model.state_dict(), left_alone(model)
    found, tied = {}, tied_modules(model)
    for name in tensors:
        target, _ = parameter_of(name, transforms, model.base_model_prefix, state)
        if target in state:
            path = holder_of(target)
            reason = policy.why_not(module_of(name), module_of(target)) or alone.get(path)
            reason = reason or why_kept(policy, tied.get(target, ()))
            found[name] = reason or unsupported(model.get_submodule(path))
    return {name: reason for name, reason in found.items() if reason}


def unquantized(
    model: nn.Module, policy: QuantizationPolicy, names: Mapping[str, list[str]] | None = None
) -> str | None:
    """The parameters of a million elements or more that are not quantized, in words; None if there are none.

    Layers are told together: "model.layers.*.mlp.experts.gate_up_proj (48 of 1611.0 MB: its experts ...)".

    Args:
        model: after loading.
        policy: what leaves out a parameter that could be quantized.
        names: {module: its names in the model's files} where they are others.
    """
    reasons = leftovers.against_policy(model, policy, names)

    def why(parameter: str) -> str | None:
        known = all_names(module_of(parameter), names or {})
        return reasons.get(parameter) or policy.why_not(*known)

    return large_parameters(model, why)


def large_parameters(model: nn.Module, why: Callable[[str], str | None]) -> str | None:
    """See `unquantized`.

    Args:
        model: after loading; layers of kbit in any format are left out.
        why: a parameter's name -> why it is not quantized, or None.
    """
    found: dict[tuple[str, str], list[int]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, TileableModule):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.numel() < leftovers.LARGE or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            full = f"{name}.{key}" if name else key
            reason = why(full) or "not a weight matrix"
            found.setdefault((_NUMBER.sub("*", full), reason), []).append(parameter.nbytes)
    if not found:
        return None
    count = sum(len(sizes) for sizes in found.values())
    lines = [
        f"{name} ({f'{len(sizes)} of ' if len(sizes) > 1 else ''}{max(sizes) / 1e6:.1f} MB: {reason})"
        for (name, reason), sizes in found.items()
    ]
    return f"kbit left {counted(count, 'large parameter')} unquantized: {'; '.join(lines)}."
