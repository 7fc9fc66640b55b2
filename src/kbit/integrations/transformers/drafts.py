"""Drafts with a tokenizer of their own: `generate` cuts their heads to the words that both models know."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from kbit.integrations.on_import import wrap_method
from kbit.nn import KbitLinear
from kbit.nn.rows import with_rows
from kbit.nn.tiling import TileableModule


def guard_drafts(module: ModuleType) -> None:
    """Have transformers keep rows of a quantized head as codes, which by itself it takes for weights.

    Args:
        module: transformers.generation.candidate_generator.
    """
    pruned = getattr(module, "_PruneReindexingLMHead", None)  # its own, which it may call otherwise one day
    if pruned is not None:
        wrap_method(pruned, "__init__", _guarded)


def _guarded(original: Any) -> Any:
    def __init__(self: Any, original_lm_head: nn.Module, assistant_overlap_token_ids: Any) -> None:
        inside = getattr(original_lm_head, "base_layer", original_lm_head)
        if not isinstance(inside, TileableModule):
            original(self, original_lm_head, assistant_overlap_token_ids)
            return
        if type(original_lm_head) is not KbitLinear:
            raise ValueError(
                f"generate: the head of assistant_model is a {type(original_lm_head).__name__} of quantized "
                f"weights, which cannot be cut to the words that both tokenizers have. Take adapters off; "
                f"leave the head in 16 bits, or have it in the k-bit format, in one process."
            )
        nn.Module.__init__(self)
        self.pruned_lm_head = with_rows(original_lm_head, assistant_overlap_token_ids)

    return __init__
