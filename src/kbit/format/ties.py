"""Modules that share one weight, such as an embedding and its output head: a policy decides for all at once.

Modules are given by their names, as `QuantizationPolicy.bits_for` takes them. The names of the first decide:
it is the embedding, under which the weight is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kbit.format.policy import QuantizationPolicy

Holders = Sequence[Sequence[str]]


def why_kept(policy: QuantizationPolicy, holders: Holders) -> str | None:
    """Why a policy leaves a shared weight unquantized: a skip, or an override of 0, of any module with it.

    >>> why_kept(QuantizationPolicy(modules_to_not_convert=["lm_head"]), [["embed_tokens"], ["lm_head"]])
    "it shares its weight with lm_head: modules_to_not_convert has 'lm_head'"
    """
    for names in holders:
        said = policy.explicit(*names)
        if isinstance(said, str):
            return shared_with(names[-1], said)
    return None


def width_of(policy: QuantizationPolicy, holders: Holders) -> int | None:
    """The width of a shared weight; None where it stays unquantized."""
    return None if why_kept(policy, holders) else policy.bits_for(*holders[0])


def contradictions(policy: QuantizationPolicy, weights: Iterable[Holders]) -> str | None:
    """Which modules get other widths than overrides give them, in one line; None if there is none.

    Args:
        policy: what is asked for.
        weights: the modules of each weight that several share.

    >>> policy = QuantizationPolicy(overrides={"lm_head": 5}, embedding_bits=4)
    >>> contradictions(policy, [[["wte"], ["lm_head"]]])
    'kbit does not follow every override: lm_head gets 4 bits and not 5, as its weight is that of wte.'
    """
    found: list[str] = []
    for holders in weights:
        width, kept = width_of(policy, holders), why_kept(policy, holders)
        for names in holders:
            said = policy.explicit(*names)
            if not isinstance(said, int) or said == width:
                continue
            if width is not None:
                rule = f"gets {width} bits and not {said}, as its weight is that of {holders[0][-1]}"
            else:
                reason = kept or shared_with(holders[0][-1], policy.why_not(*holders[0]) or "")
                rule = f"stays unquantized and does not get {said} bits: {reason}"
            found.append(f"{names[-1]} {rule}")
    told = "; ".join(dict.fromkeys(found))
    return f"kbit does not follow every override: {told}." if found else None


def shared_with(holder: str, reason: str) -> str:
    """Why a module stays unquantized whose weight is that of another, which does for a reason."""
    return f"it shares its weight with {holder}: {reason}"
