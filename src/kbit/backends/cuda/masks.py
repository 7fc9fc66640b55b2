"""The mask of causal attention, csrc/causal_mask.cu: which it makes, and its launch."""

from __future__ import annotations

import torch

from kbit.backends.cuda import elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import masks as reference

_FORMAT = "QQQ" + "i" * 6
_MINUS_INFINITY = {torch.float16: 0xFC00, torch.bfloat16: 0xFF80}
_SPEC = KernelSpec.make("causal_mask.cu")


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_SPEC]


def causal_mask(first: torch.Tensor, there: torch.Tensor | None, out: torch.Tensor) -> None:
    """`kbit::causal_mask`; the reference where the kernel may not.

    Args:
        first: int64 [1] or [].
        there: None, or bool [B, any], contiguous.
        out: [B, T, K], float16, bfloat16 or float32, contiguous, one element or more.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    batch, tokens, keys = out.shape
    count = batch * tokens * -(-keys // operands.PIECE)
    if out.dtype not in _MINUS_INFINITY or count > elementwise.MOST_THREADS:
        reference.causal_mask(first, there, out)
        return
    index = out.device.index
    kernel = launcher.load(_SPEC, index, _FORMAT)
    known = 0 if there is None else there.shape[1]
    sizes = (count, tokens, keys, known, int(there is not None), _MINUS_INFINITY[out.dtype])
    elementwise.launch(index, kernel, count, (*operands.addresses(first, there, out), *sizes))
