"""What of a loaded model stayed in 16 bits: one warning that names every large parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from torch import nn

from kbit.format.names import module_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.words import counted
from kbit.nn import replace
from kbit.nn.tiling import TileableModule

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


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
    reasons = replace.leftovers(model, policy, names)

    def why(parameter: str) -> str | None:
        known = replace.all_names(module_of(parameter), names or {})
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
            if parameter.numel() < replace.LARGE or id(parameter) in seen:
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
