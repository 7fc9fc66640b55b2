"""Products of a layer, and norms, past PyTorch's dispatcher, where nothing relies on seeing the op.

The dispatcher, and an op that is written in Python, cost a CPU microseconds that the launch itself does not,
and decoding without a CUDA graph waits for the CPU. So a layer asks here first. It gets its product unless
someone may want to see the op: a gradient, torch.compile, tracing, a profiler, a mode, a functorch transform;
or unless the op would refuse, or compute in another dtype.

`kbit.dispatch` knows the backends and stands above; it enters who multiplies, as it registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kbit.format.codebook import SUPPORTED_BITS

_OWN = (torch.Tensor, torch.nn.Parameter)  # these types exactly; no subclass such as DTensor
_CODEBOOKS = {(2**bits,) for bits in SUPPORTED_BITS}  # their shapes

# multiply(x [..., K], *parts, bias, N, K) -> [..., N]; of tiles it may be asked for silu_and_mul, at the end.
Multiply = Callable[..., torch.Tensor]
# Whether parts are of a weight [N, K]: (parts, N, K).
Holds = Callable[[tuple[torch.Tensor, ...], int, int], bool]


class Way(NamedTuple):
    """Who multiplies on devices of a type.

    Attributes:
        multiply: (x, *parts, bias, out_features, in_features) to the product.
        holds: whether the parts have the shapes of a weight.
        parts: tensors of the weight: 3 in tiles, as `kbit::linear_tiled` takes it, or 4, as `kbit::linear`.
        dtypes: activations that it takes.
    """

    multiply: Multiply
    holds: Holds
    parts: int
    dtypes: tuple[torch.dtype, ...]


class Norm(NamedTuple):
    """Who computes the functions of these names on devices of a type, of checked arguments, and where."""

    answers: Callable[[torch.Tensor], bool]
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    add_rms_norm_logits: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]


# By the type of device, "cpu" or "cuda".
ways: dict[str, Way] = {}
norms: dict[str, Norm] = {}


def has_rms_norm(x: torch.Tensor) -> bool:
    """Whether `rms_norm` is one kernel where x is."""
    norm = norms.get(x.device.type)
    return norm is not None and norm.answers(x)


def _plain(tensor: torch.Tensor) -> bool:
    """Whether no mode, transform or profiler may see ops on a tensor, and its memory holds its very values.

    Whether gradients are needed is the caller's to know.
    """
    return not (
        type(tensor) is not torch.Tensor
        or tensor.is_meta
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
        or torch.is_autocast_enabled(tensor.device.type)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_neg()
        or tensor._is_zerotensor()
    )


def _norm_of(x: torch.Tensor) -> Norm | None:
    return norms.get(x.device.type) if _plain(x) else None


def linear(
    x: torch.Tensor,
    parts: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool = False,
) -> torch.Tensor | None:
    """`kbit::linear` or `kbit::linear_tiled` of a layer's own parts, without gradient; None: call the op.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL or KBIT_BACKEND is wrong.
    """
    if not _plain(x):
        return None
    device, dtype = x.device, x.dtype
    way = ways.get(device.type)
    if way is None or dtype not in way.dtypes or len(parts) != way.parts or x.shape[-1:] != (in_features,):
        return None
    for part in parts:
        if part.device != device or type(part) not in _OWN:
            return None
    # As a layer makes them parts fit, but whoever loads or sets them may change that.
    codebook, scale = parts[-2:]
    if parts[0].dtype != torch.int32 or not codebook.dtype == scale.dtype == torch.float32:
        return None
    if codebook.shape not in _CODEBOOKS or scale.dim() or codebook.is_neg() or scale.is_neg():
        return None
    if not way.holds(parts, out_features, in_features):
        return None
    if bias is not None and not (
        type(bias) in _OWN
        and bias.shape == (out_features,)
        and bias.dtype == dtype
        and bias.device == device
        and not bias.is_neg()
    ):
        return None
    gated = (True,) if silu_and_mul else ()
    return way.multiply(x, *parts, bias, out_features, in_features, *gated)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool, round_first: bool
) -> torch.Tensor:
    """`kbit::rms_norm` of a norm's own weight [D], of x's dtype and device, and x [..., D]; no gradient.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_BACKEND is wrong.
    """
    norm = _norm_of(x)
    run = torch.ops.kbit.rms_norm if norm is None else norm.rms_norm
    return run(x, weight, eps, plus_one, round_first)


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool, round_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kbit::add_rms_norm` likewise; added is like x.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_BACKEND is wrong.
    """
    norm = _norm_of(x)
    run = torch.ops.kbit.add_rms_norm if norm is None else norm.add_rms_norm
    return run(x, added, weight, eps, plus_one, round_first)


def add_rms_norm_logits(
    x: torch.Tensor,
    added: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    router: torch.Tensor,
    last: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """`add_rms_norm` and `kbit::moe_logits` of its norm, if one kernel computes both; else None.

    Args:
        router, last, dtype: weight, last and dtype of `kbit::moe_logits`, of x's device; no gradient.
    """
    norm, others = _norm_of(x), (router,) if last is None else (router, last)
    if norm is None or any(type(other) not in _OWN or other.is_neg() for other in others):
        return None
    return norm.add_rms_norm_logits(x, added, weight, eps, plus_one, round_first, router, last, dtype)
