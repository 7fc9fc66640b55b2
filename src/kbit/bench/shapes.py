"""Layer shapes that the kernel benchmarks run, by model, as data.

`count` says how often a layer of the shape runs for one token in one transformer block of its model, and is
its weight in the TOTAL rows. Qwen3-Coder-Next follows the table users know, where each shape counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """y[M, out_features] = x[M, in_features] @ W^T; `experts` is None for a dense layer."""

    name: str
    model: str
    in_features: int
    out_features: int
    count: int
    use: str
    experts: int | None = None

    @property
    def weights(self) -> int:
        """Weights of one matrix."""
        return self.in_features * self.out_features


_QWEN, _GLM = "qwen3-coder-next", "glm-4.7-flash"
_LLAMA_8B, _LLAMA_70B = "llama-3-8b", "llama-3-70b"

SHAPES: tuple[LayerShape, ...] = (
    LayerShape("gateup", _QWEN, 2048, 5120, 1, "dense gate or up projection"),
    LayerShape("down", _QWEN, 5120, 2048, 1, "dense down projection"),
    LayerShape("q", _QWEN, 2048, 4096, 1, "query projection"),
    LayerShape("kv", _QWEN, 2048, 512, 1, "key or value projection"),
    LayerShape("o", _QWEN, 4096, 2048, 1, "attention output projection"),
    LayerShape("moe_gu", _QWEN, 2048, 512, 1, "gate or up projection of an expert", experts=512),
    LayerShape("moe_dn", _QWEN, 512, 2048, 1, "down projection of an expert", experts=512),
    LayerShape("glm_gu", _GLM, 2048, 10240, 2, "dense gate and up projections"),
    LayerShape("l8b", _LLAMA_8B, 4096, 14336, 2, "gate and up projections"),
    LayerShape("l8b_q", _LLAMA_8B, 4096, 4096, 2, "query and output projections"),
    LayerShape("l8b_kv", _LLAMA_8B, 4096, 1024, 2, "key and value projections"),
    LayerShape("l8b_down", _LLAMA_8B, 14336, 4096, 1, "down projection"),
    LayerShape("l70b", _LLAMA_70B, 8192, 28672, 2, "gate and up projections"),
    LayerShape("sq8k", _LLAMA_70B, 8192, 8192, 2, "query and output projections"),
    LayerShape("l70b_kv", _LLAMA_70B, 8192, 1024, 2, "key and value projections"),
    LayerShape("l70b_down", _LLAMA_70B, 28672, 8192, 1, "down projection"),
)
# Dense shapes only: the grouped ones need a grouped kernel.
DENSE: tuple[LayerShape, ...] = tuple(shape for shape in SHAPES if shape.experts is None)
MODELS: tuple[str, ...] = tuple(dict.fromkeys(shape.model for shape in SHAPES))


def select(names: Iterable[str] = (), models: Iterable[str] = ()) -> tuple[LayerShape, ...]:
    """Dense shapes by name, or by model, in the order of `SHAPES`; all of them when neither is given.

    Raises:
        ValueError: a name or model is unknown, a shape is an expert's, or nothing is in both choices.
    """
    names, models = list(names), list(models)
    _check("model", models, MODELS)
    _check("shape", names, tuple(shape.name for shape in SHAPES))
    grouped = [shape.name for shape in SHAPES if shape.experts and shape.name in names]
    if grouped:
        raise ValueError(
            f"bench: {', '.join(grouped)} belong to experts, which `kbit bench moe` measures. "
            f"Dense shapes: {', '.join(shape.name for shape in DENSE)}."
        )
    chosen = tuple(
        shape
        for shape in DENSE
        if (not names or shape.name in names) and (not models or shape.model in models)
    )
    if not chosen:
        raise ValueError(
            f"bench: no shape of {', '.join(names)} belongs to {', '.join(models)}. Give one or the other."
        )
    return chosen


def _check(what: str, given: list[str], known: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"bench: unknown {what} {', '.join(unknown)}; known: {', '.join(known)}.")
