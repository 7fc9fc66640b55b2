"""torch.utils.flop_counter: how many floating-point operations the products with quantized weights are.

As of 16-bit weights: two for each element of a weight and row of x. Decoding is not counted, and neither are
biases and activations, which PyTorch leaves out, too. Of sorted rows those behind the last expert's count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any

import torch

Shape = Sequence[int]


def register(module: ModuleType) -> None:
    """Have FlopCounterMode count kbit's ops. Calling it again changes nothing.

    Args:
        module: torch.utils.flop_counter.
    """
    for name, formula in FORMULAS.items():
        op = getattr(torch.ops.kbit, name)
        if op not in module.flop_registry:
            module.register_flop_formula(op)(formula)


# Each takes its op's arguments, shapes in the place of tensors, and what the counter and callers name.


def _canonical(
    x: Shape, packed: Shape, absmax: Shape, codebook: Shape, scale: Shape, rest: Any, columns: int, **_: Any
) -> int:
    return 2 * prod(x[:-1]) * packed[-2] * columns


def _tiled(
    x: Shape,
    tiled: Shape,
    codebook: Shape,
    scale: Shape,
    rest: Any,
    rows: int,
    columns: int,
    silu_and_mul: bool = False,
    source: Shape | None = None,
    **_: Any,
) -> int:
    return 2 * prod(x[:-1] if source is None else source) * rows * columns


def _merged(
    x: Shape,
    tiled: Sequence[Shape],
    codebook: Shape,
    scale: Shape,
    biases: Sequence[Shape],
    rows: Sequence[int],
    columns: int,
    *_: Any,
    **__: Any,
) -> int:
    return 2 * prod(x[:-1]) * sum(rows) * columns


def _grad_input(grad: Shape, *rest: Any, **_: Any) -> int:
    return 2 * prod(grad) * rest[-1]  # in-features


def _experts(x: Shape, *rest: Any, **_: Any) -> int:
    ids, _weights, intermediate = rest[-3:]
    return 2 * prod(ids) * 3 * intermediate * x[-1]  # gate, up and down


def _moe_logits(x: Shape, weight: Shape, dtype: Any = None, last: Shape | None = None, **_: Any) -> int:
    return 2 * prod(x) * (weight[0] + (last is not None))


FORMULAS: dict[str, Callable[..., int]] = {
    "linear": _canonical,
    "linear_train": _canonical,
    "grouped_linear": _canonical,
    "grouped_linear_train": _canonical,
    "linear_tiled": _tiled,
    "linear_tiled_train": _tiled,
    "grouped_linear_tiled": _tiled,
    "grouped_linear_tiled_train": _tiled,
    "merged_linear_tiled": _merged,
    "linear_grad_input": _grad_input,
    "linear_tiled_grad_input": _grad_input,
    "grouped_linear_grad_input": _grad_input,
    "grouped_linear_tiled_grad_input": _grad_input,
    "experts_tiled": _experts,
    "experts_with_shared": _experts,
    "moe_logits": _moe_logits,
}
