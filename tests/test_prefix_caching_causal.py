"""Prefix caching of models whose tokens see what follows them: nothing is kept, and of all others it is."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kbit
from test_prefix_caching import answer, kept_of, tokens

SIZES = {
    "vocab_size": 72,
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "intermediate_size": 64,
    "decoder_ffn_dim": 64,
    "ffn_dim": 64,
    "num_hidden_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 1,
    "num_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 72,
    "num_kv_shared_layers": 0,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(kind, **settings):
    """A small model of a kind, with random weights."""
    known = AutoConfig.for_model(kind)
    has = {*known.to_dict(), *known.attribute_map}
    given = {name: size for name, size in SIZES.items() if name in has}
    if getattr(known, "layer_types", None):
        given["layer_types"] = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(type(known)(**given, **settings), dtype=torch.float32).eval()


def of_llama(change):
    """A Llama whose config is changed first."""
    config = AutoConfig.for_model("llama", **{k: v for k, v in SIZES.items() if "size" in k or "num" in k})
    change(config)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def sees_everything(config):
    config.is_causal = False


def says_that_it_is_no_decoder(config):
    config.is_decoder = False


def with_attention_to_both_sides():
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


ENCODERS = ["bert", "roberta", "electra"]
# These look at their config alone; as decoders they need masks that older versions of transformers lack.
WITHOUT_A_WORD = ["big_bird", "megatron-bert", "rembert", "roformer"]
NOT_CAUSAL = {
    **{kind: lambda kind=kind: build(kind) for kind in (*ENCODERS, *WITHOUT_A_WORD)},
    **{f"{kind} to decode": lambda kind=kind: build(kind, is_decoder=True) for kind in WITHOUT_A_WORD},
    "gemma": lambda: build("gemma", use_bidirectional_attention=True),
    "gemma3_text": lambda: build("gemma3_text", use_bidirectional_attention=True),
    "gemma4_text": lambda: build("gemma4_text", use_bidirectional_attention="all"),
    "a config": lambda: of_llama(sees_everything),
    "layers": with_attention_to_both_sides,
    "moshi": lambda: build("moshi"),
}
CAUSAL = {
    **{kind: lambda kind=kind: build(kind, is_decoder=True) for kind in ENCODERS},
    # Those whose configs have a field is_decoder, and say no.
    **{kind: lambda kind=kind: build(kind) for kind in ("gpt_neox", "gpt_neox_japanese")},
    # And those with attention to an encoder, which is not causal.
    **{kind: lambda kind=kind: build(kind) for kind in ("bart", "bigbird_pegasus", "marian")},
    **{kind: lambda kind=kind: build(kind) for kind in ("gemma", "gemma2", "gemma3_text")},
    "gemma4_text": lambda: build("gemma4_text", use_bidirectional_attention="vision"),
    "a field of no meaning": lambda: of_llama(says_that_it_is_no_decoder),
}


def turns(model):
    """Two, of which the second begins as the first and its answer."""
    first = answer(model, tokens(40))
    return first, answer(model, torch.cat((first, tokens(9, 3)), 1))


def kept_after_turns(model):
    """How many caches are kept of them, which are the same as without."""
    want = turns(model)
    kbit.enable_prefix_caching(model)
    assert all(map(torch.equal, turns(model), want))
    return len(kept_of(model))


@pytest.mark.parametrize("made", NOT_CAUSAL.values(), ids=NOT_CAUSAL)
def test_nothing_is_kept_where_tokens_see_what_follows(made):
    assert kept_after_turns(made()) == 0


@pytest.mark.parametrize("made", CAUSAL.values(), ids=CAUSAL)
def test_conversations_are_kept_of_models_that_look_back(made):
    assert kept_after_turns(made()) == 1
