"""Tiny random models in sizes that vLLM takes on a CPU, quantized and decoded; what it answers by them."""

import contextlib
import gc
import re
import shutil

import torch
from safetensors.torch import load_file, save_file

import kbit
import tiny_models

PROMPTS = [[1, 2, 3, 4, 5], [9, 17, 30, 12, 5, 2, 7, 8, 10, 40] * 3]
# Merged layers of two widths, and factors other than 1, by the models' own spread.
POLICY = {"bits": 4, "overrides": {r"down_proj$": 3, r"k_proj$": 5}, "embedding_bits": 5}


def config_of(architecture):
    """As `tiny_models` has it, with larger heads."""
    config = tiny_models.ARCHITECTURES[architecture]()
    config.hidden_size = 64
    if hasattr(config, "moe_intermediate_size"):
        config.intermediate_size, config.moe_intermediate_size = 128, 64
    elif hasattr(config, "num_local_experts"):
        config.intermediate_size = 64
    if architecture == "glm4_moe_lite":
        config.first_k_dense_replace = 1
        config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim = 512, 64, 128
        config.head_dim, config.v_head_dim, config.qk_head_dim = 64, 128, 192
    else:
        config.head_dim = 32
    if architecture == "qwen3_next":
        config.linear_key_head_dim = config.linear_value_head_dim = 64
    return config


def save(architecture, folder, headless=False):
    """The folders of a model of mixed widths, and of the same with its weights decoded to float32."""
    from transformers import AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    kind = AutoModel if headless else AutoModelForCausalLM
    model = kind.from_config(config_of(architecture), dtype=torch.float32).eval()
    tiny_models.spread_magnitudes(model)
    kbit.quantize_model(model, kbit.KbitConfig(**POLICY))
    model.save_pretrained(folder / "quantized")
    kbit.dequantize_model(model, torch.float32)
    model.save_pretrained(folder / "decoded")
    return folder / "quantized", folder / "decoded"


def fuse_experts(source, target, factor):
    """A copy of a checkpoint with a layer's experts in two tensors, of factor `factor`, or none stored."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    tensors = load_file(file)
    experts = {}
    for name in list(tensors):
        found = re.fullmatch(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight(_packed|_absmax|_scale)", name)
        if found:
            experts.setdefault(found.groups(), []).append(tensors.pop(name))
    for (layer, matrix, part), stack in experts.items():
        if part != "_scale" and matrix != "up":
            rows = [stack, experts[layer, "up", part]] if matrix == "gate" else [stack]
            name = f"{layer}.{'gate_up' if matrix == 'gate' else matrix}_proj"
            tensors[name + part] = torch.cat([torch.stack(one) for one in rows], dim=1)
            if factor is not None:
                tensors[f"{name}_scale"] = torch.full((len(stack),), factor)
    save_file(tensors, file, metadata={"format": "pt"})
    return target


def _save_tokenizer(folder):
    """One whose words are the numbers of tokens; vLLM pools nothing without one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({str(token): token for token in range(72)}, unk_token="0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="0").save_pretrained(folder)


def packed_bytes(worker):
    """[(bytes of codes, bytes of the memory that they keep alive)] of a worker's linear layers."""
    products = [
        one for layer in worker.model_runner.model.modules() for one in getattr(layer, "products", ())
    ]
    return [(one.weight_packed.nbytes, one.weight_packed.untyped_storage().nbytes()) for one in products]


@contextlib.contextmanager
def engine(folder, dtype="float32", **options):
    """vLLM on a folder, one layer after the other."""
    from vllm import LLM

    gc.collect()  # what is left of the one before
    gc.freeze()  # or each of an engine's eight collections would look at all of vLLM
    settings = {"max_model_len": 64, "max_num_seqs": 4, "enforce_eager": True}
    llm = LLM(str(folder), dtype=dtype, **{**settings, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def pool(folder, task, **options):
    """What vLLM makes of `PROMPTS` as wholes, [prompts, width]; `task` is "embed" or "classify"."""
    _save_tokenizer(folder)
    with engine(folder, runner="pooling", **options) as llm:
        found = getattr(llm, task)([{"prompt_token_ids": one} for one in PROMPTS], use_tqdm=False)
    return torch.tensor([one.outputs.embedding if task == "embed" else one.outputs.probs for one in found])


def run(folder, dtype="float32", adapter=None, between=None, **options):
    """[(tokens, logarithms of the likeliest ones' probabilities)] of vLLM's answers to `PROMPTS`.

    `between` is called with the engine before it is asked.
    """
    from vllm import SamplingParams

    with engine(folder, dtype, skip_tokenizer_init=True, **options) as llm:
        if between is not None:
            between(llm)
        greedy = SamplingParams(max_tokens=6, temperature=0, logprobs=1, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = llm.generate(prompts, greedy, use_tqdm=False, lora_request=adapter)
    return [(list(one.outputs[0].token_ids), _likeliest(one.outputs[0].logprobs)) for one in found]


def _likeliest(places):
    return [max(choice.logprob for choice in place.values()) for place in places]
