"""Type checks of arguments: a dense tensor, a quantized weight, a flag.

The schemas of ops would say it less clearly, and functions without one would take the truth of anything.
"""

from __future__ import annotations

import torch

from kbit.format.tensor import QuantizedTensor
from kbit.format.words import at


def tensor(op: str, name: str, value: object, where: str = "") -> None:
    """Raise TypeError unless the argument `name` is a dense tensor."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested:
        return
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise TypeError(
            f"{op}: {name} must be dense, got a nested tensor{at(where)}. Use .to_padded_tensor(0.0)."
        )
    if isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be dense, got {value.layout}{at(where)}. Use .to_dense().")
    decode = "kbit.dequantize" if isinstance(value, QuantizedTensor) else _instead(value, "dequantize")
    if decode:
        raise TypeError(
            f"{op}: {name} must be a tensor, got {type(value).__name__}{at(where)}. It is quantized already: "
            f"{decode} decodes it."
        )
    raise TypeError(
        f"{op}: {name} must be a tensor, got {type(value).__name__}{at(where)}. Make one of it: "
        f"torch.as_tensor."
    )


def flag(op: str, name: str, value: object, where: str = "") -> None:
    """Raise TypeError unless the argument `name` is True or False; a misplaced factor has a truth, too."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{op}: {name} must be True or False, got {repr(value)[:80]}{at(where)}. Pass options by name."
        )


def quantized(op: str, q: object, where: str = "") -> None:
    """Raise TypeError unless the weight is quantized."""
    if not isinstance(q, QuantizedTensor):
        of = f" of {where}" if where else ""
        if other := _instead(q, op):
            remedy = f"Use {other}"
        elif hasattr(q, "quantized"):  # a quantized layer has one to give
            remedy = "Pass its .quantized()"
        else:
            remedy = "Make one: kbit.quantize(weight, bits=4)"
        raise TypeError(f"{op}: the weight{of} must be a QuantizedTensor, got {type(q).__name__}. {remedy}.")


def _instead(value: object, op: str) -> str | None:
    """What does `op` with a weight of another format, which says so itself: formats are known above here."""
    known: dict[str, str] = getattr(type(value), "functions", {})
    return known.get(op) if isinstance(known, dict) else None
