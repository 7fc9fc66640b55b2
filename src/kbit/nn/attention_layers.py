"""What transformers' layers of attention call their own layers, and caches: these are told by the names."""

from __future__ import annotations

# With shared heads of keys and values: what makes queries, keys and values, and takes the result.
PROJECTIONS, OUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
LAYERS = {*PROJECTIONS, OUT}

# Latent attention: what makes latents and keys, their norm, what expands them. OUT takes its result, too.
LATENT, NORM, EXPAND = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
LATENT_LAYERS = {LATENT, NORM, EXPAND}

# The argument that is a cache; before transformers 5.24; and of linear attention then. Later layers take the
# former names from others, too, and rename them.
CACHE, FORMER_CACHE, FORMER_STATES = "cache", "past_key_values", "cache_params"
