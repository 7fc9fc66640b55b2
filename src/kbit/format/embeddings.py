"""What models call their embeddings and output heads: a policy knows these by the names alone.

The names are those of `nn.Embedding` modules, and of linear layers onto the vocabulary, in the models of
transformers. Left out is what an ordinary linear layer is called in any of them (`embed`, `input_embedding`,
`query`; `head`, `output`, `out`, `out_proj`, `proj_out`), and vectors that detectors of objects learn.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Looked up by the ids of tokens, so that an output head may share their weight.
TOKEN_TABLES = _words("""
    embed_tokens embedding embeddings wte word_embeddings word_embedding token_embedding tok_embeddings
    tokens_embed embed_in shared input_embeds_layer input_embeds_layers codec_embed codec_embedding
    code_embedding embed_audio_tokens embed_text_tokens text_embed_tokens text_token_embedding
    """)

# Looked up by positions, kinds of tokens, languages, speakers; and by ids, but beside another such table.
OTHER_TABLES = _words("""
    position_embeddings position_embedding embed_positions wpe positions_embed pos_embed pos_emb
    position_embeds_layer position_embedding_table text_position_embedding visual_position_embeddings
    row_embeddings column_embeddings row_embedder column_embedder row_position_embeddings
    col_position_embeddings x_position_embeddings y_position_embeddings h_position_embeddings
    w_position_embeddings char_position_embeddings box_position_embeddings query_position_embeddings
    rel_embeddings rel_pos_emb relative_attention_bias global_relative_attention_bias distance_embedding
    token_type_embeddings visual_token_type_embeddings task_type_embeddings segment_emb segment_embedding
    lang_embeddings language_embedding language_id_embedding speaker_embedding speaker_id_embedding
    embed_tokens_per_layer ngram_embedding ngram_embeddings unit_embedding embed_char entity_embeddings
    value_embeddings
    """)

# `decoder` is the linear layer of BERT's heads; other modules of that name have no weight themselves.
HEADS = _words("""
    lm_head lm_heads embed_out decoder generator_lm_head text_lm_head audio_lm_head codec_head lm_loss
    output_projection vocab_projector logits_dense
    """)

_ALL = TOKEN_TABLES | OTHER_TABLES | HEADS
# All that versions of kbit before these lists knew.
_AT_FIRST = _words("embed_tokens embedding embeddings wte lm_head embed_out")


def is_embedding(module_name: str) -> bool:
    """Whether a module is an embedding or an output head, by its name.

    The last component decides that is no number: of several heads one is called lm_heads.0.

    >>> is_embedding("model.embed_tokens"), is_embedding("decoder.lm_heads.0"), is_embedding("mlp.shared.up")
    (True, True, False)
    """
    return _last(module_name) in _ALL


def is_token_table(module_name: str) -> bool:
    """Whether a module is the table of tokens, of which an output head may have the weight."""
    return _last(module_name) in TOKEN_TABLES


def is_head(module_name: str) -> bool:
    """Whether a module is an output head, onto the vocabulary; those of tasks (`score`) are not meant."""
    return _last(module_name) in HEADS


def was_embedding(module_name: str) -> bool:
    """Whether a module was an embedding or head to versions of kbit that knew six names."""
    return module_name.rpartition(".")[2] in _AT_FIRST


def _last(name: str) -> str:
    parts = name.split(".")
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return parts[-1]
