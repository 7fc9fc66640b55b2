"""RMS norm and SiLU product, alone and with the quantizer; see `kbit.nvfp4.kernels.Kernels`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.nvfp4.exact import exp, fma
from kbit.nvfp4.reference.quantize import quantize

# A block of 256 threads, 8 columns (16 bytes of 16-bit data) to each.
THREADS = 256
VECTOR = 8
_WARP = 32


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.rmsnorm`."""
    h = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    values = h.float()
    columns = torch.tensor(float(x.shape[1]), dtype=torch.float32, device=x.device)
    mean = sum_of_squares(values) / columns + torch.tensor(eps, dtype=torch.float32, device=x.device)
    # Through float64: torch's float32 root on a CPU is one unit off now and then, and twice as many digits
    # make the second rounding harmless (Figueroa 1995).
    root = torch.sqrt(mean.double()).float()
    factor = torch.ones_like(mean) / root
    normed = (values * factor[:, None]).to(x.dtype)
    return (normed.float() * weight.float()).to(x.dtype), h


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """float32 [M, K] -> [M], in the order that 256 threads take; see `Kernels.rmsnorm`."""
    rows, columns = values.shape
    step = THREADS * VECTOR
    # Zeros beyond K change nothing: fma(0, 0, partial) is partial.
    padded = F.pad(values, (0, -columns % step)).view(rows, -(-columns // step), THREADS, VECTOR)
    partial = torch.zeros(rows, THREADS, dtype=torch.float32, device=values.device)
    for stride in padded.unbind(1):
        for column in stride.unbind(-1):
            partial = fma(column, column, partial)
    warps = partial.view(rows, THREADS // _WARP, _WARP)
    width = _WARP // 2
    while width:
        # Both lanes of a pair get the same sum, so half of them are enough.
        warps = warps[..., :width] + warps[..., width:]
        width //= 2
    total = warps[:, 0, 0]
    for warp in range(1, THREADS // _WARP):
        total = total + warps[:, warp, 0]
    return total


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    write_norm: bool,
    search: bool,
    ties_even: bool,
    global_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See `Kernels.rmsnorm_quantize`."""
    norm, h = rmsnorm(x, weight, eps, residual)
    codes, scales = quantize(norm, search, ties_even, global_scale)
    return codes, scales, norm if write_norm else None, h


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Kernels.silu_mul`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = (gate / (exp(-gate) + 1.0)).to(gate_up.dtype)
    return (activated.float() * up).to(gate_up.dtype)


def silu_mul_quantize(
    gate_up: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.silu_mul_quantize`."""
    return quantize(silu_mul(gate_up), search, ties_even, global_scale)
