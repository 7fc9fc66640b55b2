"""The CUDA backend: kernels compiled at their first use for the GPU at hand (sm_80 and newer).

Functions take contiguous tensors of one CUDA device that the op layer has checked; they launch on the current
stream. `quantize` waits for the device, once, to report NaN and Inf, and so do products of experts that no
kernel takes (float32, say).

    products, preference, tables     y = x W^T: by which kernel; what was measured; grouped_preference alike
    stream, wgmma, mma, decoded      kernels of one weight; stream_config, wgmma_config, mma_config: what is
                                     compiled of them; stream_preference, wgmma_estimate: which launch
    grouped, resident, one_token     experts; sorted_rows, routing: around their products
    router_logits, norm_logits       a router's logits, alone and with the norm in front
    rows, row_launch, gradients      whole rows: quantize, decode, both layouts; gradients in x of experts
    norm, position, masks, caches, heads, elementwise              around attention
    attention, attention_rests, latent, latent_prompts             attention
    gated_delta, delta_rule          linear attention
    ranks                            sums over GPUs
    compiler, libraries, driver, launcher, tensor_map, capture     from a source to a launch
    operands, weights, weight_shape  what launches ask of tensors and weights
    variants, ahead                  every kernel there is; those that a model will use
    nvfp4                            the kernels of `kbit.nvfp4`
"""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import compiler, driver
from kbit.backends.cuda.attention import attention_step
from kbit.backends.cuda.attention_rests import attention_rest
from kbit.backends.cuda.caches import cache_append
from kbit.backends.cuda.decoded import linear
from kbit.backends.cuda.delta_rule import gated_delta_rule
from kbit.backends.cuda.gated_delta import gated_delta_inputs, gated_delta_output, gated_delta_step
from kbit.backends.cuda.heads import append_heads
from kbit.backends.cuda.latent import latent_attention_step
from kbit.backends.cuda.latent_prompts import latent_heads
from kbit.backends.cuda.masks import causal_mask
from kbit.backends.cuda.norm import rms_norm
from kbit.backends.cuda.position import rotary, rotary_angles
from kbit.backends.cuda.products import experts_tiled, grouped_linear_tiled, linear_tiled
from kbit.backends.cuda.ranks import one_shot
from kbit.backends.cuda.router_logits import moe_logits
from kbit.backends.cuda.routing import moe_align, moe_combine, moe_route
from kbit.backends.cuda.rows import (
    dequantize,
    dequantize_tiled,
    embedding,
    from_tiled,
    quantize,
    to_tiled,
)
from kbit.format.errors import KbitError

__all__ = [
    "append_heads",
    "attention_rest",
    "attention_step",
    "available",
    "cache_append",
    "causal_mask",
    "dequantize",
    "dequantize_tiled",
    "embedding",
    "experts_tiled",
    "from_tiled",
    "gated_delta_inputs",
    "gated_delta_output",
    "gated_delta_rule",
    "gated_delta_step",
    "grouped_linear_tiled",
    "latent_attention_step",
    "latent_heads",
    "linear",
    "linear_tiled",
    "moe_align",
    "moe_combine",
    "moe_logits",
    "moe_route",
    "one_shot",
    "quantize",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "to_tiled",
    "unavailable_reason",
]


def available() -> bool:
    """Whether the kernels can be compiled and launched here, on some device."""
    return unavailable_reason() is None


@functools.cache
def unavailable_reason(index: int | None = None) -> str | None:
    """Why a device has no kernels and what to do about it, else None.

    Args:
        index: as torch counts devices, one of which may be too old; None asks whether any has kernels.
    """
    if not torch.cuda.is_available():
        return "torch sees no CUDA device. Install a CUDA build of torch and NVIDIA's driver"
    reasons = [_reason(one) for one in (range(torch.cuda.device_count()) if index is None else (index,))]
    return None if None in reasons else reasons[0]


def _reason(index: int) -> str | None:
    try:
        compiler.chosen_compiler().require(driver.device_arch(index))
    except KbitError as error:
        return str(error).removesuffix(".")
    return None
