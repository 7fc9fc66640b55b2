"""torch.ops.kbit.*: schemas, argument checks, autograd, and the functional API over them."""

from kbit.ops import autograd, schemas, tiled_schemas  # noqa: F401  (imported for their registrations)
from kbit.ops.api import dequantize, embedding, grouped_linear, linear, quantize

__all__ = ["dequantize", "embedding", "grouped_linear", "linear", "quantize"]
