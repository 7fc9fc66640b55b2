"""What quantization costs in quality: perplexity, and KL divergence from the unquantized model.

Teacher forced: both models read the same windows of text, and every position but a window's last is
scored. KL divergence compares whole next-token distributions, so it sees damage that perplexity, which looks
at one token, averages away; a few thousand tokens are enough to tell two quantizers apart.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.tied import distinct_weights
from kbit.nvfp4 import NVFP4Tensor, dequantize_nvfp4
from kbit.nvfp4.layers import NVFP4Experts
from kbit.ops import dequantize


@dataclass(frozen=True)
class Quality:
    """Perplexity of a model, and its mean KL divergence in nats from a reference (None without one)."""

    perplexity: float
    kl_divergence: float | None
    tokens: int


def windows(
    ids: torch.Tensor, size: int = 512, max_tokens: int | None = None, what: str = "the text"
) -> torch.Tensor:
    """Cut token ids [T] into whole windows [n, size]; a text shorter than one gives a single short one.

    Args:
        ids: int64 [T].
        size: tokens of a window.
        max_tokens: leave out those behind so many.
        what: the text's name, for the message.

    Raises:
        ValueError: fewer than two tokens, so nothing could be scored.
    """
    ids = ids[:max_tokens] if max_tokens else ids
    if ids.numel() < 2:
        raise ValueError(f"{what} has {ids.numel()} tokens; at least 2 are needed. Give a longer one.")
    size = min(size, ids.numel())
    count = ids.numel() // size
    return ids[: count * size].view(count, size)


@torch.inference_mode()
def log_probabilities(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """float32 [n, size - 1, vocabulary]: log probabilities of each next token."""
    logits = model(input_ids=batch.to(model.device), use_cache=False).logits
    return torch.log_softmax(logits[:, :-1].float(), dim=-1)


def compare(
    model: Any,
    ids: torch.Tensor,
    reference: Any = None,
    progress: Callable[[int], None] | None = None,
) -> Quality:
    """Score a model on windows of text.

    Args:
        model: a causal language model in evaluation mode.
        ids: int64 [n, size], see `windows`.
        reference: the unquantized model, to compute the KL divergence from.
        progress: called with the number of windows done.

    Returns:
        Quality over all n * (size - 1) scored tokens.
    """
    return compare_each({"": model}, ids, reference, progress)[""]


def compare_each(
    models: Mapping[str, Any],
    ids: torch.Tensor,
    reference: Any = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Quality]:
    """Score several models on the same text, running the reference once for all of them.

    Args:
        models: {name: model}; the reference may be one of them.
        ids, reference, progress: see `compare`.

    Returns:
        {name: Quality}.
    """
    loss = dict.fromkeys(models, 0.0)
    divergence = dict.fromkeys(models, 0.0)
    for index, window in enumerate(_each(ids)):
        expected = None if reference is None else log_probabilities(reference, window)
        for name, model in models.items():
            if expected is not None and model is reference:
                scores = expected
            else:
                scores = log_probabilities(model, window)
            loss[name] -= _sum(scores.gather(-1, window[:, 1:, None].to(scores.device)))
            if expected is not None:
                exact = expected.to(scores.device)
                terms = torch.where(exact > -torch.inf, exact.exp() * (exact - scores), 0)
                divergence[name] += _sum(terms.sum(-1))
        if progress is not None:
            progress(index + 1)
    count = ids.shape[0] * (ids.shape[1] - 1)
    return {
        name: Quality(
            _exp(loss[name] / count), None if reference is None else divergence[name] / count, count
        )
        for name in models
    }


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of a model's modules on the very same tensors: only what is put into it takes memory."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def quantized_weights(model: nn.Module) -> list[tuple[str, str]]:
    """(module, weight) of all that is quantized in a model; of tied ones the first."""
    return [(name, weight) for name, _, weight in distinct_weights(model)]


def sizes_of(model: Any, base: Any) -> dict[str, Any]:
    """Bits per quantized weight and, where there is an unquantized model, their relative squared error.

    Raises:
        ValueError: that one has other weights.
    """
    parts: list[tuple[str, Any, str]] = [*distinct_weights(model)]
    if not parts:
        return {}
    count = sum(math.prod(module.shapes[weight]) for _, module, weight in parts)
    nbytes = sum(module.quantized(weight).nbytes for _, module, weight in parts)
    error = {} if base is None else {"nmse": _relative_error(parts, base)}
    return {"bits_per_weight": round(8 * nbytes / count, 4), **error}


def _weight_of(base: Any, name: str, weight: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The reference's own of a quantized weight; raises ValueError where it has none of that shape."""
    weight = dict(zip(NVFP4Experts.WEIGHTS, WEIGHTS, strict=True)).get(weight, weight)
    try:
        found = getattr(base.get_submodule(name), weight).detach()
    except AttributeError:
        found = None
    if found is None or tuple(found.shape) != shape:
        what = "is not there" if found is None else f"is {tuple(found.shape)}"
        raise ValueError(f"{name}.{weight} is {shape}, and {what} in the reference. Are they one model?")
    return found


def _relative_error(parts: list[tuple[str, Any, str]], base: Any) -> float:
    """Squared error of all quantized weights over their squared sum."""
    error = total = 0.0
    for name, module, weight in parts:
        exact = _weight_of(base, name, weight, tuple(module.shapes[weight])).float()
        q = module.quantized(weight)
        decoded = (dequantize_nvfp4 if isinstance(q, NVFP4Tensor) else dequantize)(q).view_as(exact)
        error += float((decoded - exact).square().sum())
        total += float(exact.square().sum())
    return error / total if total else 0.0


def _sum(values: torch.Tensor) -> float:
    return float(values.double().sum())


def _exp(value: float) -> float:
    """Infinity where e^value is beyond a float, as a broken model's perplexity may be."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _each(ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """One window at a time: the distributions over a large vocabulary are the memory this needs."""
    yield from ids.split(1)
