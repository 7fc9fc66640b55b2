"""torch.ops.kbit.*: schemas, argument checks, autograd, and the functional API over them."""

# Imported for their registrations.
from kbit.ops import (  # noqa: F401
    attention_rest_schemas,
    attention_schemas,
    autograd,
    cache_schemas,
    gated_delta_schemas,
    heads_schemas,
    latent_heads_schemas,
    latent_schemas,
    mask_schemas,
    moe_schemas,
    norm_schemas,
    one_shot_schemas,
    rotary_schemas,
    schemas,
    tiled_schemas,
)
from kbit.ops.api import dequantize, embedding, grouped_linear, linear, quantize

__all__ = ["dequantize", "embedding", "grouped_linear", "linear", "quantize"]
