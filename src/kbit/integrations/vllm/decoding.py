"""Quantized weights of layers that vLLM builds without a quantization method: decoded while they are loaded.

Many of vLLM's models do not hand their quantization to the embedding, some not to the output head, and hold
it in 16 bits then. A model takes what it wants from a stream of a checkpoint's tensors, which passes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kbit.format.codebook import BLOCK_SIZE
from kbit.format.names import ABSMAX, PACKED, PARTS, SCALE, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.reference import blocks_of
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import first_of
from kbit.integrations.on_import import wrap_method
from kbit.ops import api

_logger = init_logger("vllm.kbit")

Stream = Iterable[tuple[str, torch.Tensor]]


def decode_what_is_plain() -> None:
    """Have vLLM's loader of safetensors files decode what a model of a k-bit checkpoint holds in 16 bits."""
    wrap_method(DefaultModelLoader, "get_all_weights", _decoding)


def _decoding(get_all_weights: Callable[..., Stream]) -> Callable[..., Stream]:
    def decoded(self: Any, model_config: Any, model: nn.Module) -> Stream:
        # What is plain is not asked before a tensor is: some models make their head when they load.
        stream = get_all_weights(self, model_config, model)
        current = get_current_vllm_config_or_none()
        config = getattr(model, "quant_config", None) or (current and current.quant_config)
        plain = config.plain_modules(model) if hasattr(config, "plain_modules") else {}
        if not plain:
            yield from stream
            return
        _logger.warning(
            "%s holds %s in 16 bits, whatever the checkpoint does: decoded while loading.",
            type(model).__name__,
            first_of(plain),
        )
        yield from decode(stream, plain, config.policy, config.factors, model_config.dtype)

    return decoded


def decode(
    stream: Stream,
    columns: dict[str, int | None],
    policy: QuantizationPolicy,
    factors: set[str],
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """A stream of tensors with the parts of some weights replaced by the weights.

    Args:
        stream: (name, tensor) of a checkpoint, in any order.
        columns: {module: in-features} of those to decode; of a rank where columns are split, None if unknown.
        policy: the checkpoint's.
        factors: names of the checkpoint's factors; others are 1.
        dtype: of the decoded weights.
    """
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stream:
        original = original_of(name)
        module = module_of(name)
        if original == name or module not in columns:
            yield name, tensor
            continue
        parts = held.setdefault(original, {})
        parts[name.removeprefix(original)] = tensor
        if all(part in parts or (part == SCALE and original + SCALE not in factors) for part in PARTS):
            yield original, _decode(held.pop(original), columns[module], policy, dtype)


def _decode(
    parts: dict[str, torch.Tensor], columns: int | None, policy: QuantizationPolicy, dtype: torch.dtype
) -> torch.Tensor:
    packed, absmax = parts[PACKED], parts[ABSMAX]
    blocks = absmax.shape[-1]
    bits = packed.shape[-1] // blocks
    if columns is None or blocks_of(columns) != blocks:
        columns = blocks * BLOCK_SIZE
    scale = parts.get(SCALE)
    if scale is None:
        scale = torch.ones(packed.shape[:-2], dtype=torch.float32, device=packed.device)
    codebook = policy.codebook_for(bits).to(packed.device)
    q = QuantizedTensor(packed, absmax, codebook, scale, bits, (*packed.shape[:-1], columns))
    return api.dequantize(q, dtype)
