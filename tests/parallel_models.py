"""Tiny models whose sizes two ranks can share: every split weight's in-features are a multiple of 64."""

import torch

_COMMON = {
    "vocab_size": 72,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def _llama():
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON, tie_word_embeddings=True, attention_bias=True)


def _qwen3_moe():
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_COMMON, **_MOE, num_experts=4, mlp_only_layers=[1])


_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "shared_expert_intermediate_size": 64,
}


def _qwen3_next():
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**_COMMON, **_MOE, **_LINEAR)


def _qwen3_5_moe():
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**_COMMON, **_MOE, **_LINEAR)


def _glm4_moe_lite():
    from transformers import Glm4MoeLiteConfig

    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]}
    common = {key: value for key, value in _COMMON.items() if key != "head_dim"}
    return Glm4MoeLiteConfig(**common, **_MOE, v_head_dim=32, **latent, **experts)


def _mixtral():
    from transformers import MixtralConfig

    return MixtralConfig(**_COMMON, num_local_experts=4, num_experts_per_tok=2)


# Modules that are called otherwise in files; not among those that every test is run on.
RENAMED = {"mixtral": _mixtral}
PARALLEL = {
    "llama": _llama,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4_moe_lite": _glm4_moe_lite,
}


def build_parallel(architecture, spread=True, **sizes):
    """A random bfloat16 model; with `spread`, some weights are outside E4M4's range, so factors differ."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = (PARALLEL | RENAMED)[architecture]()
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
            if spread and name.endswith("gate_up_proj"):
                # Only the last expert's gate: split by id, one rank has two factors, the other one.
                parameter[-1, : parameter.shape[1] // 2] *= 2.0**-9
            if spread and name.endswith("0.self_attn.o_proj.weight"):
                parameter[:, :32] *= 2.0**-9  # of the first rank's columns only
    return model
