"""What transformers calls a cache differs by release; models are called by the name that they have."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

import kbit
from kbit.integrations.transformers.cache_argument import (
    CACHE_NAMES,
    cache_in,
    cache_name,
    with_cache,
    without_cache,
)
from kbit.ops import direct
from tiny_models import ARCHITECTURES

IDS = torch.tensor([[3, 5, 7, 11, 13]])
# The second is the older one, which later releases take, too.
TAKEN = CACHE_NAMES[CACHE_NAMES.index(cache_name()) :]


def test_arguments_and_outputs():
    named = {"a": 1, "past_key_values": None, "cache": "one"}
    assert cache_in(named) == "one" == cache_in({"past_key_values": "one"})
    assert cache_in({}) is None
    assert without_cache(named) == {"a": 1}
    assert with_cache("other", named) == {"a": 1, cache_name(): "other"}
    assert cache_name() in CACHE_NAMES


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_layers_take_their_cache_by_either_name(architecture, name, monkeypatch):
    """Those whose sums and norms are fused, too, as on a GPU."""
    monkeypatch.setattr(direct, "has_rms_norm", lambda x: True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), dtype=torch.bfloat16).eval()
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4))
    cache, x = DynamicCache(config=model.config), model.get_input_embeddings()(IDS)
    positions = torch.arange(IDS.shape[1])[None]
    angles = model.model.rotary_emb(x, positions)
    for layer in model.model.layers:
        x = layer(x, position_embeddings=angles, position_ids=positions, **{name: cache})
    assert cache.get_seq_length() == IDS.shape[1]
    have = model(IDS[:, :1], **with_cache(cache)).logits
    want = model(torch.cat((IDS, IDS[:, :1]), 1)).logits[:, -1:]
    torch.testing.assert_close(have, want, rtol=0.05, atol=0.05)
