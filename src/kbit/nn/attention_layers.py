"""What transformers' layers of attention call their own layers: these are told by the names."""

from __future__ import annotations

# With shared heads of keys and values: what makes queries, keys and values, and takes the result.
PROJECTIONS, OUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
LAYERS = {*PROJECTIONS, OUT}

# Latent attention: what makes latents and keys, their norm, what expands them. OUT takes its result, too.
LATENT, NORM, EXPAND = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
LATENT_LAYERS = {LATENT, NORM, EXPAND}
