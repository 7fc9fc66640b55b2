"""Classes of transformers that are layers of gated delta attention: where they are, and what they project."""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    """A class of transformers.

    Attributes:
        module: where it is.
        projections: names of its layers that make `projected` and `gates`, two that do, or four that make
            their parts: channels, gates, betas, alphas.
    """

    module: str
    projections: tuple[str, ...]

    @property
    def by_heads(self) -> bool:
        """How those are ordered."""
        return len(self.projections) == 2

    @property
    def package(self) -> str:
        """Where its model is, with a dot behind."""
        return self.module.rpartition(".")[0] + "."


_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_MODELS = "transformers.models"
_NORM = "RMSNormGated"  # how its name ends
FAMILIES = {
    "Qwen3NextGatedDeltaNet": Family(
        f"{_MODELS}.qwen3_next.modeling_qwen3_next", ("in_proj_qkvz", "in_proj_ba")
    ),
    "Qwen3_5GatedDeltaNet": Family(f"{_MODELS}.qwen3_5.modeling_qwen3_5", _PARTS),
    "Qwen3_5MoeGatedDeltaNet": Family(f"{_MODELS}.qwen3_5_moe.modeling_qwen3_5_moe", _PARTS),
}


def family_of(module: Any) -> Family | None:
    """The family of a layer, of a class made of one of `FAMILIES` or derived from it, too; None of others."""
    for kind in type(module).__mro__:
        family = FAMILIES.get(kind.__name__)
        if family is not None and kind.__module__ == family.module:  # or it is somebody else's of that name
            return family
    return None


def has_own_norm(layer: Any, family: Family) -> bool:
    """Whether a layer's gated norm is that of its family, and not one of another class."""
    kind = type(layer.norm)
    return kind.__module__ == family.module and kind.__name__.endswith(_NORM)


def ratio_of(layer: Any) -> float:
    """Heads of values to one of keys."""
    return layer.num_v_heads / layer.num_k_heads


def layout_of(module: Any) -> tuple[bool, float] | None:
    """Whether a layer projects by heads of keys, and heads of values to one of them; None of others."""
    family = family_of(module)
    return None if family is None else (family.by_heads, ratio_of(module))
