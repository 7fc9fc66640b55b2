"""Overrides, skips and `embedding_bits` that match no module: one line that names them and what was meant."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import SequenceMatcher

from kbit.format import patterns
from kbit.format.embeddings import is_embedding
from kbit.format.policy import QuantizationPolicy
from kbit.format.skips import is_inside

# A name is near a pattern from this likeness on, of 1.
NEAR = 0.6
NEAREST = 3


def unmatched(
    policy: QuantizationPolicy,
    quantizable: Collection[str],
    others: Collection[str],
    tied: Collection[str] = (),
) -> str | None:
    """What of a policy matches no module of a model, in one line; None if everything matches.

    Args:
        policy: its overrides, skips and `embedding_bits` are looked at.
        quantizable: names, in the model and in its files, of the modules that can be quantized.
        others: names of further modules. They can be left unquantized only, so overrides to a width do not
            match them.
        tied: those of modules with the weight of a quantizable one, whose name decides. Overrides match them;
            what becomes of those tells `kbit.format.ties.contradictions`.
    """
    others = [name for name in others if name not in set(tied)]
    everything = [*quantizable, *tied, *others]
    missed, rule = [], ""
    for pattern, bits in policy.overrides.items():
        known = [*quantizable, *tied] if bits else everything
        if not any(patterns.is_found(pattern, name) for name in known):
            found = [name for name in others if patterns.is_found(pattern, name)] if bits else []
            missed.append(f"override '{pattern}'{_no_layer(found) or _nearest(pattern, known)}")
    for skipped in policy.modules_to_not_convert or ():
        if not any(is_inside(name, skipped) for name in everything):
            missed.append(f"skip '{skipped}'{_nearest(skipped, everything)}")
            rule = " A skip is a whole name, without *; an override to 0 bits is a pattern: 'self_attn=0'."
    if policy.embedding_bits is not None and not any(map(is_embedding, quantizable)):
        found = [name for name in others if is_embedding(name)]
        missed.append(f"embedding_bits={policy.embedding_bits}{_no_layer(found)}")
    if not missed:
        return None
    return f"kbit found no module for {', '.join(missed)}.{rule}{_about_experts(quantizable)}"


def _nearest(pattern: str, names: Collection[str]) -> str:
    """Names, or parents, that end much like a pattern, those of all layers as one; nothing if none does."""
    # Of a weight, whose name ends like no module's, the module.
    wanted = re.sub(r"\\[a-zA-Z]|[^\w.]", "", pattern).removesuffix(".weight")
    parts = wanted.count(".") + 1
    likeness: dict[str, float] = {}
    for name in _of_all_layers(names):
        words = name.split(".")
        for end in range(1, len(words) + 1):
            ending = ".".join(words[max(0, end - parts) : end])
            likeness[".".join(words[:end])] = SequenceMatcher(None, wanted, ending).ratio()
    near = [name for name, value in likeness.items() if value >= NEAR]
    ranked = sorted(near, key=lambda name: likeness[name], reverse=True)[:NEAREST]
    return f" (nearest: {', '.join(ranked)})" if ranked else ""


def _no_layer(names: Collection[str]) -> str:
    """What a pattern found instead of a layer, one name of all layers'."""
    found = _of_all_layers(names)[:NEAREST]
    has = "have" if len(found) > 1 else "has"
    return f" ({', '.join(found)} {has} no weight that can be quantized)" if found else ""


def _about_experts(names: Collection[str]) -> str:
    experts = [name for name in _of_all_layers(names) if name.rpartition(".")[2] == "experts"]
    return f" All experts of a layer are one module: {' or '.join(experts)}." if experts else ""


def _of_all_layers(names: Collection[str]) -> list[str]:
    """Distinct names with * for numbers, in the order given."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names if name))
