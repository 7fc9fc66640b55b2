"""Angles of rotary embeddings by one kernel, `kbit::rotary_angles`, where transformers runs ten operators.

Once a step or prompt, but that is as long as a quantized layer takes. A class is tried first, and stays what
it is where it computes something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.integrations.transformers.attention_steps import Kinds, Tried, is_plain_call, tried
from kbit.nn.mixins import stand_in
from kbit.nn.standing_in import is_on_gpu, trial
from kbit.ops import checks

_FREQUENCIES, _FACTOR, _TYPE = "inv_freq", "attention_scaling", "rope_type"
_OF_AXES = "mrope_section"  # an attribute of those that take positions by axes
_kinds = Kinds((), (_FACTOR, _TYPE))
_TRIED_POSITIONS = [[0, 3, 70001], [1, 17, 262143]]
_TRIED_FREQUENCIES = [1.0, 0.37, 0.004]
_known: Tried[bool | None] = Tried()


@contextlib.contextmanager
def fused_angles(model: Any) -> Iterator[None]:
    """A model's rotary embeddings run as here where that gives what they give."""
    with _kinds.run(model, _fused):
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(layer: Any, *given: Any, **named: Any) -> Any:
        x, positions = _given(*given, **named)
        if (
            positions is None
            or not _takes(layer, x, positions)
            or not tried(_known, layer, own, lambda: _is(layer, own))
        ):
            return own(layer, *given, **named)
        factor = float(getattr(layer, _FACTOR))
        return torch.ops.kbit.rotary_angles(layer._buffers[_FREQUENCIES], positions, factor, x.dtype)

    return forward


def _given(x: Any = None, position_ids: Any = None, *more: Any, **named: Any) -> tuple[Any, Any]:
    """What most modules are called with; no positions of a call that has more, or other names."""
    return x, None if more or named else _plain(position_ids)


def _plain(positions: Any) -> torch.Tensor | None:
    """Positions [B, T]; of those by axes [A, B, T], which models that see have, where all axes are one."""
    if type(positions) is not torch.Tensor or positions.dim() not in (2, 3):
        return None
    if positions.dim() == 2:
        return positions
    return positions[0] if len(positions) and not positions.stride(0) else None


def _takes(layer: Any, x: Any, positions: Any) -> bool:
    """Whether angles are those of plain positions [B, T], by frequencies that do not depend on them."""
    frequencies = layer._buffers.get(_FREQUENCIES)
    if any(type(tensor) is not torch.Tensor for tensor in (x, positions, frequencies)):
        return False
    if not is_plain_call() or not is_on_gpu(x) or x.dtype not in checks.HALF_DTYPES:
        return False
    kind = getattr(layer, _TYPE)
    if not isinstance(kind, str) or "dynamic" in kind or kind == "longrope":
        return False
    plain = positions.dtype == torch.int64 and frequencies.dtype == torch.float32 and frequencies.dim() == 1
    return plain and x.device == positions.device == frequencies.device


@trial
def _is(layer: Any, own: Callable[..., Any]) -> bool:
    """Whether a layer's own forward gives what the op gives, tried on a CPU in bfloat16."""
    made = stand_in(layer)
    factor = float(getattr(layer, _FACTOR))
    frequencies = torch.tensor(_TRIED_FREQUENCIES, device="cpu")
    positions = torch.tensor(_TRIED_POSITIONS, device="cpu")
    made._buffers = {**layer._buffers, _FREQUENCIES: frequencies}
    x = torch.zeros(len(positions), positions.shape[1], 2, dtype=torch.bfloat16, device="cpu")
    have = torch.ops.kbit.rotary_angles(frequencies, positions, factor, x.dtype)
    axes = positions.expand(3, -1, -1) if hasattr(layer, _OF_AXES) else positions
    want = own(made, x, axes)
    return len(want) == len(have) and all(map(torch.equal, want, have))
