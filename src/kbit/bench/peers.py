"""Other people's kernels join the tables where they can be imported; else the reason is printed.

* Humming (PyPI humming-kernels): integers, groups of 32, scales float8e4m3, compiled on first use.
* torch's own int4: groups of 32, a bfloat16 scale and zero per group, bfloat16 activations only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kbit.format.words import dtype_name, first_line

GROUP = 32


@dataclass(frozen=True)
class PeerWeight:
    """One copy of a peer's weight: x [M, K] -> y [M, N], and the bytes it occupies."""

    call: Callable[[torch.Tensor], torch.Tensor]
    nbytes: int


@dataclass(frozen=True)
class Peer:
    """`reason` says why it cannot take a problem at all, `make(w, bits)` builds one copy from w [N, K]."""

    name: str
    reason: Callable[[int, torch.dtype], str | None]
    make: Callable[[torch.Tensor, int], PeerWeight]


def _humming_reason(bits: int, dtype: torch.dtype) -> str | None:
    try:
        importlib.import_module("humming.layer")
    except Exception as error:  # it loads libraries of its own, which fail in their own ways
        return f"cannot be imported ({type(error).__name__}: {error}); pip install humming-kernels"
    return None


def _humming(w: torch.Tensor, bits: int) -> PeerWeight:
    layer_type = importlib.import_module("humming.layer").HummingLayer
    config = {"dtype": f"int{bits}", "group_size": GROUP, "scale_dtype": "float8e4m3"}
    layer = layer_type(shape_n=w.shape[0], shape_k=w.shape[1], torch_dtype=w.dtype, weight_config=config)
    layer = layer.to(w.device)
    layer.load_from_unquantized(w)
    layer.transform()
    # Its buffers are locks, not weights.
    nbytes = sum(part.nbytes for part in layer.parameters())
    return PeerWeight(layer, nbytes)


def _torch_int4_reason(bits: int, dtype: torch.dtype) -> str | None:
    if bits != 4:
        return "has 4 bits only"
    if dtype != torch.bfloat16:
        return f"takes bfloat16 only, not {dtype_name(dtype)}"
    return None


def _torch_int4(w: torch.Tensor, bits: int) -> PeerWeight:
    out_features, in_features = w.shape
    # Speed does not depend on values: random codes, and a scale and zero for each group.
    codes = torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8, device=w.device)
    packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(in_features // GROUP, out_features, 2, dtype=w.dtype, device=w.device)

    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)

    return PeerWeight(call, packed.nbytes + scales.nbytes)


PEERS: tuple[Peer, ...] = (
    Peer("humming", _humming_reason, _humming),
    Peer("torch int4", _torch_int4_reason, _torch_int4),
)


def build(peer: Peer, w: torch.Tensor, bits: int, copies: Callable[[int], int]) -> list[PeerWeight] | str:
    """Copies of one weight for a peer, or the reason why it has none.

    Args:
        peer: whose.
        w: [N, K] on the GPU.
        bits: width.
        copies: from bytes of one copy to their number.
    """
    reason = peer.reason(bits, w.dtype)
    if reason is not None:
        return reason
    try:
        first = peer.make(w, bits)
        return [first, *(peer.make(w, bits) for _ in range(copies(first.nbytes) - 1))]
    except Exception as error:  # a peer's refusal must not end our run
        return f"refuses {w.shape[1]}x{w.shape[0]}, k={bits}: {first_line(error)}"


def try_call(weight: PeerWeight, x: torch.Tensor) -> str | None:
    """Why a peer refuses x [M, K]; None where it does not."""
    try:
        weight.call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    except Exception as error:  # a peer's refusal must not end our run
        return f"refuses M={x.shape[0]}, K={x.shape[1]}: {first_line(error)}"
    return None
