"""`resize_token_embeddings` of models whose table or head is quantized: codes get no rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kbit.integrations.on_import import wrap_method
from kbit.integrations.transformers.counting import whole_shape
from kbit.nn.tiling import TileableModule


def guard_resizing(module: ModuleType) -> None:
    """Have transformers leave quantized tables and heads of the wanted size, and refuse to resize others.

    By themselves they take codes for weights, and may have replaced the other of the two by then.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "resize_token_embeddings", _guarded)


def _guarded(original: Any) -> Any:
    def guarded(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        if _already(self, new_num_tokens, pad_to_multiple_of):
            return self.get_input_embeddings()
        return original(self, new_num_tokens, pad_to_multiple_of, *rest, **kw)

    return guarded


def _already(model: Any, wanted: int | None, multiple: int | None) -> bool:
    """Whether a table or a head is quantized, and both have `wanted` rows, rounded up to a multiple.

    Raises:
        ValueError: one is quantized and would change.
    """
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, TileableModule) and not isinstance(head, TileableModule):
        return False
    rows = _rows(table, "num_embeddings")
    wanted = rows if wanted is None else wanted
    if multiple:
        wanted = -(-wanted // multiple) * multiple
    if wanted == rows == _rows(head, "out_features", rows):
        return True
    raise ValueError(
        f"resize_token_embeddings: embedding or head is quantized and has {rows} rows, got {wanted}. Resize "
        f"the unquantized model and quantize it then, or leave both unquantized (embedding_bits=None)."
    )


def _rows(layer: Any, attribute: str, otherwise: int | None = None) -> Any:
    """Rows of a table or head; of all ranks where each holds a part, of which the attributes tell."""
    quantized = isinstance(layer, TileableModule)
    return whole_shape(layer, "weight")[0] if quantized else getattr(layer, attribute, otherwise)
