"""A router's logits with the norm in front of it, csrc/norm_logits.cu: when, and its launch."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import launcher, norm, operands, router_logits
from kbit.backends.cuda.compiler import KernelSpec

_FORMAT = "QQQQQQQQiifii"
_SOURCE = "norm_logits.cu"
# Pieces of 16 bytes of a row: from those on of which rms_norm.cu keeps as many in a thread.
_LEAST_PIECES = norm.PIECES[router_logits.KEPT - 1] + 1
_MOST_PIECES = router_logits.KEPT * router_logits.BLOCK_THREADS
# Experts of a block, from how many logits on, by whether the weight is float32. With fewer, which made logits
# take less time, a model's step took more.
_EACH = {False: {1: 1, 33: 5, 193: 4}, True: {1: 1, 33: 4}}
# Up to which a norm of its own for each block is faster than a launch of one.
_MOST_TOKENS, _MOST_LOGITS = 16, 1280


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [
        router_logits.few_spec(_SOURCE, kind, 1, each)
        for kind in router_logits.KINDS
        for each in _EACH[kind[-1]].values()
    ]


def takes(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    router: torch.Tensor,
    last: torch.Tensor | None,
) -> bool:
    """Whether the kernel takes x and added [..., D], a norm's weight [D], router [E, D] and last [1, D].

    The last two may be float32; logits must be then.
    """
    columns, experts = x.shape[-1], router.shape[0] + (last is not None)
    fits = not columns % operands.PIECE and _LEAST_PIECES <= columns // operands.PIECE <= _MOST_PIECES
    if x.dtype not in operands.DTYPES or router.dtype not in (x.dtype, torch.float32) or not fits:
        return False
    tokens = x.numel() // columns
    block = router_logits.few_block(tokens, experts, columns, router.dtype != x.dtype)
    if block is None or block[0] > 1 or tokens > _MOST_TOKENS or tokens * experts > _MOST_LOGITS:
        return False
    of_x, of_router = (x, added, weight), (router,) if last is None else (router, last)
    if any(one.dtype != x.dtype for one in of_x) or any(one.dtype != router.dtype for one in of_router):
        return False
    return all(
        one.device == x.device
        and one.shape[-1] == columns
        and one.is_contiguous()
        and not one.data_ptr() % 16
        for one in (*of_x, *of_router)
    )


def add_rms_norm_logits(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    router: torch.Tensor,
    last: torch.Tensor | None,
    total: torch.Tensor,
    out: torch.Tensor,
    logits: torch.Tensor,
) -> None:
    """`kbit::add_rms_norm`, and `kbit::moe_logits` of its norm, bit for bit; of tensors that `takes` allows.

    Args:
        x, added, weight, eps, plus_one, round_first, total, out: as in `kbit.backends.cuda.rms_norm`.
        router: [E, D], of x's dtype or float32.
        last: None, or one more row [1, D].
        logits: [tokens, E], or E + 1 with `last`, of x's dtype or float32, written; float32 if the router is.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    pieces, (tokens, experts) = x.shape[-1] // operands.PIECE, logits.shape
    kinds = (x.dtype, logits.dtype == torch.float32, router.dtype != x.dtype)
    prepared = _prepared(x.device.index, kinds, pieces, tokens, experts)
    places = operands.addresses(x, added, weight, total, out, router, last, logits)
    prepared.launch((*places, experts, pieces, eps, plus_one, round_first))


@functools.lru_cache(maxsize=4096)
def _prepared(
    index: int, kinds: tuple[torch.dtype, bool, bool], pieces: int, tokens: int, experts: int
) -> launcher.Prepared:
    each = router_logits.each_of(_EACH[kinds[-1]], tokens * experts)
    launch = router_logits.few_launch(_SOURCE, kinds, (tokens, experts, pieces), (1, each))
    kernel = launcher.load(launch.spec, index, _FORMAT)
    return launcher.Prepared(index, kernel, launch.grid, launch.threads)
