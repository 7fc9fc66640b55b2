"""Models of other kinds than those tested throughout give from graphs what they give without."""

from __future__ import annotations

import pytest
import torch
import transformers

from graph_tape import enable_on_cpu

IDS = torch.randint(3, 90, (2, 14), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).index_put((torch.tensor([1, 1]), torch.tensor([0, 1])), torch.tensor(0))
SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
INDEXER = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 64,
}


def llava(text_type, **more):
    text = {"model_type": text_type, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 64, **SIZES}
    config = transformers.LlavaConfig(
        text_config=text | more, vision_config=VISION, image_token_index=98, pad_token_id=0
    )
    return transformers.LlavaForConditionalGeneration(config)


def made(kind, **more):
    """A model of a family, for which this transformers may be too old."""
    config = getattr(transformers, f"{kind}Config", None)
    if config is None:
        pytest.skip(f"this transformers has no {kind}")
    return getattr(transformers, f"{kind}ForCausalLM")(config(**SIZES | more))


def positions_by_axes():
    """Qwen2.5-VL, whose positions are of time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text = SIZES | {"num_key_value_heads": 2, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    tokens = {"image_token_id": 95, "video_token_id": 96, "vision_start_token_id": 97}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


MODELS = {
    "sparse latent attention": lambda: made("DeepseekV32", **LATENT, **INDEXER),
    "sparse latent attention, another": lambda: made("GlmMoeDsa", **LATENT, **INDEXER),
    "masks of its own": lambda: made("Falcon", alibi=False, multi_query=True),
    "no hidden states of the whole decoder": lambda: made("OPT", ffn_dim=64, word_embed_proj_dim=64),
    "positions by axes": positions_by_axes,
    "an eager decoder": lambda: llava("gemma2", layer_types=["full_attention"] * 2),
}


@pytest.mark.parametrize("mask", [torch.ones_like(IDS), MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", MODELS)
def test_answers_are_those_without_graphs(kind, mask):
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.15)  # so that it matters what attention sees
    if kind == "an eager decoder":
        model.set_attn_implementation({"text_config": "eager"})

    def logits():
        settings = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        more = {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": "static"}
        return torch.stack(model.generate(IDS, attention_mask=mask, **settings, **more).logits)

    want = logits()
    recorder = enable_on_cpu(model)
    for _ in range(3):
        torch.testing.assert_close(logits(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert recorder.replayed, "no step came from a graph"
