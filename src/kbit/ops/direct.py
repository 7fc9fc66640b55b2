"""Products of a layer without PyTorch's dispatcher, where nothing would listen to it.

Through an op that is written in Python a product costs a CPU as much as half a dozen of PyTorch's own, and
decoding without a CUDA graph waits for the CPU. So a layer asks here first. It gets its product unless
someone may want to see the op: a gradient, torch.compile, tracing, a profiler, a mode, a functorch transform;
or unless the op would refuse, or compute in another dtype.

`kbit.dispatch` knows the backends and stands above; it sets who multiplies, as it registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# multiply(x [..., K], tiled, codebook, scale, bias, N, K) -> [..., N]; see `kbit::linear_tiled`.
Multiply = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, int, int], torch.Tensor
]
_DTYPES = (torch.float16, torch.bfloat16)

_multiply: Multiply | None = None


def set_multiply(multiply: Multiply) -> None:
    """Set who multiplies by tiles on a GPU."""
    global _multiply
    _multiply = multiply


def _plain(tensor: torch.Tensor) -> bool:
    """Whether nothing listens to what is done to a tensor; gradients are the caller's to know."""
    return not (
        type(tensor) is not torch.Tensor
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_tracing()
        or torch.autograd._profiler_enabled()
        or torch.is_autocast_enabled("cuda")
    )


def linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
) -> torch.Tensor | None:
    """`kbit::linear_tiled` of a layer's own parts, without gradient; None: call the op.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong.
    """
    if _multiply is None or not x.is_cuda or not _plain(x) or x.dtype not in _DTYPES:
        return None
    parts = (tiled, codebook, scale)
    if x.shape[-1:] != (in_features,) or any(part.device != x.device for part in parts):
        return None
    if bias is not None and not (
        type(bias) in (torch.Tensor, torch.nn.Parameter)
        and bias.shape == (out_features,)
        and bias.dtype == x.dtype
        and bias.device == x.device
    ):
        return None
    return _multiply(x, tiled, codebook, scale, bias, out_features, in_features)
