"""What stays unquantized in a model and might not have been meant to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from kbit.format.names import all_names, module_of
from kbit.format.policy import ROUTERS, QuantizationPolicy
from kbit.format.ties import shared_with
from kbit.format.words import counted
from kbit.nn.embedding import KbitEmbedding
from kbit.nn.parts import QuantizedModule
from kbit.nn.support import left_alone, unsupported

# Elements from which on a parameter that stays in 16 bits is worth a word.
LARGE = 1_000_000


def against_policy(
    model: nn.Module, policy: QuantizationPolicy, names: Mapping[str, list[str]] | None = None
) -> dict[str, str]:
    """Large parameters that stay as they are although the policy would quantize them: {name: reason}.

    Args:
        names: {module: its names in the model's checkpoints} where they are others.
    """
    found = {}
    alone = left_alone(model)
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)

    def why(name: str, parameter: nn.Parameter) -> str:
        for holder in (name, *holders[id(parameter)]):
            reason = unsupported(model.get_submodule(holder)) or alone.get(holder)
            reason = reason or policy.why_not(*all_names(holder, names or {}))
            if reason is not None:
                return reason if holder == name else shared_with(holder, reason)
        return "the checkpoint has it unquantized, or in another layout"

    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{key}" if name else key
            known = not is_lazy(parameter)  # PyTorch's lazy modules have no sizes before the first call
            large = known and parameter.numel() >= LARGE and parameter.dim() > 1
            if large and policy.bits_for(*all_names(module_of(full), names or {})):
                found[full] = why(name, parameter)
    return found


def by_name(
    model: nn.Module, policy: QuantizationPolicy, names: Mapping[str, list[str]] | None = None
) -> dict[str, str]:
    """Large linear layers that are called as heads, embeddings or routers are, but may be none.

    A head has as many rows as a table of the model, and routers come with experts.

    Args:
        names: as in `against_policy`.

    Returns:
        {parameter: what it is taken for}.
    """
    tables = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding | KbitEmbedding)}
    has_experts = any("experts" in name.split(".") for name, _ in model.named_modules())
    found = {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if not isinstance(module, nn.Linear) or weight is None or is_lazy(weight) or weight.numel() < LARGE:
            continue
        known = all_names(name, names or {})
        router = any(map(ROUTERS.search, known))
        real = has_experts if router else module.out_features in tables or "lm_head" in name
        if not real and policy.explicit(*known) is None and policy.why_not(*known) is not None:
            what = "a router" if router else "an embedding or output head"
            found[f"{name}.weight"] = (
                f"taken for {what} by its name; overrides={{{name!r}: {policy.bits}}} quantizes it"
            )
    return found


def warning(model: nn.Module, policy: QuantizationPolicy, names: Mapping[str, list[str]]) -> str | None:
    """What to say of a model that was quantized in place, or None; `names`: as in `against_policy`."""
    found = against_policy(model, policy, names) | by_name(model, policy, names)
    if not found:
        return None
    lines = "; ".join(f"{name}: {reason}" for name, reason in found.items())
    return f"kbit left {counted(len(found), 'large parameter')} unquantized: {lines}."
