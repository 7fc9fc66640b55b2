"""Tiny random models of the architectures that the transformers integration is tested on.

Sizes are no multiples of 32 wherever the architecture allows.
"""

import json

import kbit
from kbit.format.checkpoint import parts_to_save
from kbit.format.names import is_candidate, module_of

_COMMON = {
    "vocab_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}
_MOE = {"intermediate_size": 72, "moe_intermediate_size": 24, "num_experts_per_tok": 2}


def _llama():
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**_COMMON, **sizes)


def _qwen3():
    from transformers import Qwen3Config

    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_key_value_heads": 1, "attention_bias": True}
    return Qwen3Config(**_COMMON, **sizes, tie_word_embeddings=False)


def _qwen3_moe():
    from transformers import Qwen3MoeConfig

    sizes = {"hidden_size": 48, "num_experts": 4, "num_key_value_heads": 1, "mlp_only_layers": [1]}
    return Qwen3MoeConfig(**_COMMON, **_MOE, **sizes)


_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED = {
    "hidden_size": 48,
    "num_experts": 4,
    "num_key_value_heads": 1,
    "shared_expert_intermediate_size": 24,
}


def _qwen3_next():
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(**_COMMON, **_MOE, **_SHARED, **_LINEAR)


def _qwen3_5_moe():
    from transformers import Qwen3_5MoeTextConfig

    heads = {"linear_num_value_heads": 6, "linear_num_key_heads": 2}
    return Qwen3_5MoeTextConfig(**_COMMON, **_MOE, **_SHARED, **(_LINEAR | heads))


def _glm4_moe_lite():
    from transformers import Glm4MoeLiteConfig

    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]}
    common = {key: value for key, value in _COMMON.items() if key != "head_dim"}
    sizes = {"hidden_size": 48, "num_key_value_heads": 2, "v_head_dim": 16}
    return Glm4MoeLiteConfig(**common, **_MOE, **sizes, **latent, **experts)


def _mixtral():
    """Its checkpoints call things otherwise than its modules do: block_sparse_moe.experts.0.w1."""
    from transformers import MixtralConfig

    sizes = {"hidden_size": 48, "intermediate_size": 24, "num_local_experts": 4, "num_key_value_heads": 1}
    return MixtralConfig(**_COMMON, **sizes, num_experts_per_tok=2)


def _granitemoe():
    """Its checkpoints hold experts fused, as weights of parallel layers: block_sparse_moe.input_linear."""
    from transformers import GraniteMoeConfig

    common = {key: value for key, value in _COMMON.items() if key != "head_dim"}
    sizes = {"hidden_size": 48, "intermediate_size": 24, "num_local_experts": 4, "num_key_value_heads": 1}
    return GraniteMoeConfig(**common, **sizes, num_experts_per_tok=2, tie_word_embeddings=False)


ARCHITECTURES = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe": _qwen3_5_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "mixtral": _mixtral,
    "granitemoe": _granitemoe,
}


def write_config(config, path):
    """A model's config.json, as a command takes it that builds models of random weights."""
    path.write_text(json.dumps(config.to_diff_dict() | {"model_type": config.model_type}))
    return path


def build(architecture, dtype, spread=True):
    """A random model; with `spread`, some magnitudes are outside E4M4's range, so factors come into play."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[architecture](), dtype=dtype).eval()
    if spread:
        spread_magnitudes(model)
    return model


def spread_magnitudes(model):
    """Give some weights magnitudes outside E4M4's range, so that they get factors other than 1."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter[1, : parameter.shape[1] // 2] *= 2.0**-9
            if name.endswith("0.self_attn.o_proj.weight"):
                parameter *= 2.0**-9


def build_with_tokenizer(architecture, folder):
    """A folder of a float32 model and a tokenizer whose words are w0 to w71."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    build(architecture, torch.float32, spread=False).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(72)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    takes = ["input_ids", "attention_mask"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", model_input_names=takes)
    fast.save_pretrained(folder)
    return folder


def quantize_files(source, target, policy):
    """What `kbit quantize` does, tensor by tensor, without any model."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    stored = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        bits = policy.bits_for(module_of(name)) if is_candidate(name, tensor.shape) else None
        if bits is None:
            stored[name] = tensor
            continue
        q = kbit.quantize(tensor, bits, policy.codebook_for(bits), policy.absmax_format, policy.search)
        stored.update(parts_to_save(name, q))
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = policy.to_dict()
    (target / "config.json").write_text(json.dumps(config))
