"""Keys of all heads of latent attention, csrc/latent_heads.cu: what it takes, and its launch."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import latent as reference

_FORMAT = "Q" * 7 + "Q" * 10 + "i" * 5
_TURNED = 64  # columns, of DeepSeek's and GLM's layers
_OWN = _TURNED // 2  # that others are a multiple of
_THREADS = 256


@functools.cache
def _spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec.make("latent_heads.cu", bf16=dtype == torch.bfloat16, turned=_TURNED)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_spec(dtype) for dtype in operands.DTYPES]


def takes(own: int, turned: int) -> bool:
    """Whether the kernel computes heads of `own` columns and `turned` more."""
    return turned == _TURNED and not own % _OWN


def latent_heads(
    query: torch.Tensor,
    expanded: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    turned: torch.Tensor,
) -> None:
    """`kbit::latent_heads`; the reference where the kernel may not.

    Args:
        query, expanded, key, cos, sin, interleaved: as in `kbit.ops.latent_heads_schemas`; no empty ones.
        keys: [B, T, H, N + R], contiguous, written.
        turned: [B, T, R], likewise.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    strides = operands.all_pieces(query, expanded, key, cos, sin)
    (batch, tokens, heads, columns), of_key = query.shape, key.shape[2]
    own = columns - of_key
    count = batch * tokens * heads * columns // operands.PIECE
    fits = query.dtype in operands.DTYPES and takes(own, of_key) and count <= elementwise.MOST_THREADS
    if not fits or strides is None or strides[3] != strides[4]:
        reference.latent_heads(query, expanded, key, cos, sin, interleaved, keys, turned)
        return
    by_query, by_expanded, by_key, by_angle, _ = strides
    along = operands.by_sequence(cos, by_angle)
    index = query.device.index
    kernel = launcher.load(_spec(query.dtype), index, _FORMAT)
    places = operands.addresses(query, expanded, key, cos, sin, keys, turned)
    sizes = (count, tokens, heads, own // operands.PIECE, int(interleaved))
    elementwise.launch(
        index, kernel, count, (*places, *by_query, *by_expanded, *by_key, *along, *sizes), _THREADS
    )
