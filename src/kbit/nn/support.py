"""Which modules quantize_model and loading replace, and why others stay as they are."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as every_module

from kbit.nn.fused_experts import WEIGHTS, is_experts, unsupported_experts
from kbit.nn.sizes import other_sizes

# Layers whose weight transformers' code reads: (class of the module that reads it, the layer's path inside).
_READERS = (
    # A product with it, or with a part of it.
    (r"Mamba\w*Mixer$", "dt_proj"),  # Mamba, FalconMamba, Jamba, Zamba: dt_proj.weight @ time_step
    (r"^WavLMAttention$", r"[qkv]_proj|out_proj"),  # handed to a function of PyTorch
    (r"^MobileBertLMPredictionHead$", "decoder|dense"),  # it joins both into one matrix
    (r"MHAttentionMap$", "k_proj|k_linear"),  # DETR and models like it
    (r"^TDNNLayer$", "kernel"),  # Wav2Vec2 and models like it
    (r"^LSHSelfAttention$", "query_key|value"),  # Reformer, for each head
    (r"^Gemma3nTextAltUp$", r"\w+_coefs"),  # in training
    (r"^(Gemma4\w*AssistantForCausalLM|NeoMMEForMaskedLM)$", "lm_head|unembedding_projection"),
    (r"^Deberta(V2)?ForMaskedLM$", r"deberta\.embeddings\.word_embeddings"),  # a head that is not `legacy`
    (r"^PerceiverForMaskedLM$", r"perceiver\.input_preprocessor\.embeddings"),
    (r"^RwkvModel$", r"blocks\.\d+\.(attention\.output|feed_forward\.value)"),  # halved in place
    # All rows of it: biases by distance, positions, what is learned to be looked for, codebooks.
    (r"^(LayoutLMv[23]|PPDocLayoutV2\w+)Encoder$", r"rel_pos\w*_bias"),
    (r"^(Deberta(V2)?|SEWDTransformer)Encoder$", "rel_embeddings"),
    (r"^ProphetNetDecoder$", "ngram_embeddings"),  # added to what it embeds
    (r"^(AudioFlamingo3|Qwen2Audio|Voxtral)Encoder$|^Moss\w+AudioModel$", "embed_positions"),
    (r"^(Sam|EdgeTam)\w*(Encoder|Decoder)$", r"\w+_(embed|tokens?)(\.\d)?|reference_points"),
    (r"(Detr|Dino|Table)\w*Model$", r"query_\w*(embeddings|feat)|reference_point\w+|patterns"),
    (r"^(Mask2?|One)FormerTransformerModule$", r"queries_\w+|level_embed"),
    (r"^(OneFormerTextMapper|OmDetTurboDecoder)$", "prompt_ctx|tgt_embed"),
    (r"omt\w*ForUniversalSegmentation$", "query"),  # EoMT, VidEoMT
    (r"^DeepseekOcr2VisionModel$", r"query_\d+_resolution"),
    (r"^RelativePositionBias", "relative_attention_bias"),  # UDOP, to make a larger one
    (r"VectorQuantizer?$", "embedding|codebook"),
    # Its dtype, to cast to it.
    (r"VisionEmbeddings$|PatchEmbed(der)?$", r"(patch_|position_)embedding|(\w+_)?proj"),
    (r"ActDense$|VisionMlp$|^SeamlessM4T\w*Network$", "wo|fc2"),  # T5, for one: x.to(wo.weight.dtype)
    (r"^Col\w+ForRetrieval$", "embedding_proj_layer"),  # ColPali, ColQwen2
    (r"^Blip2\w+(Projection|Retrieval)$", r"\w+_projection|itm_head"),
    (r"^GraniteSpeech5Encoder$", "input_linear"),
    (r"^Gemma4Unified\w+Embedder$", "patch_dense|embedding_projection"),
    (r"^(PocketTTS|GradiumPhononTTS)Model$", r"audio_\w+_proj"),
    (r"^(NeoMMEMultiVectorHead|JevForDecision)$", "proj"),
    (r"ForPreTraining$", "project_q"),  # Wav2Vec2 and models like it
    (r"^EsmFold2", r"(atom|coords)_linear|(pair|noise)_proj|(pae|distogram)_head|embed|token_bonds"),
    (r"^(FSMT|Vits)Model$", r"(decoder|text_encoder)\.embed_tokens"),
    (r"Indexer$", "weights_proj"),  # sparse attention of DeepSeek-V3.2 and models like it
    (r"^(Falcon)?Mamba2?ForCausalLM$|^(xLSTM|HYV4)ForCausalLM$|^HYV4VLFor", "lm_head"),
    (r"^Inkling2LoopMessageGate$", "down_proj"),
)

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_is_full_backward_hook",
)
# Of a module: {name: value} of what was on the layer that it replaced, beside what layers have; ... for a
# value that it took over under the same name.
_OWN = "_kbit_own"
# They read or write a `weight`, which a quantized module has no tensor for.
_HOOKS_OF_STATES = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def unsupported(module: nn.Module) -> str | None:
    """Why a module cannot be replaced by a quantized one, or None if it can.

    Subclasses of nn.Linear and nn.Embedding may compute something else, so only the classes themselves are
    replaced; and so may a module with a forward of its own, unless it is accelerate's.
    """
    if has_own_forward(module):
        return "its forward is not that of its class"
    if any(vars(module).get(hooks) for hooks in _HOOKS_OF_STATES):
        return "it has hooks on its state dict"
    if isinstance(module, nn.Linear | nn.Embedding) and type(module) in (nn.Linear, nn.Embedding):
        if "weight" not in module._parameters:
            return "a hook computes its weight at every call"
        weight = module._parameters["weight"]
        if weight is None:
            return "it has no weight"
        if weight.dim() == 2 and not weight.numel():
            return "its weight has no elements"
        if reason := other_sizes(module) or _more_than_weights(module, "weight", "bias"):
            return reason
        if getattr(module, "bias", None) is not None and module._parameters.get("bias") is None:
            return "its bias is no parameter"
        return "it has max_norm" if getattr(module, "max_norm", None) is not None else None
    if is_experts(module):
        return unsupported_experts(module) or _more_than_weights(module, *WEIGHTS, "act_fn")
    return f"{type(module).__name__} is not nn.Linear, nn.Embedding or a module of fused experts"


def _more_than_weights(module: nn.Module, *known: str) -> str | None:
    """Why a module stays that has something of its own, which whoever put it there would miss."""
    held = {**module._parameters, **module._buffers, **module._modules}
    more = [name for name, value in held.items() if value is not None and name not in known]
    return f"it holds {', '.join(more)}, too" if more else None


def refuse_mixed(widths: Mapping[str, Mapping[int, str]]) -> None:
    """Refuse modules whose tensors get several widths.

    Args:
        widths: {module: {width: a tensor, or a name, that gets it}}.

    Raises:
        ValueError: there is such a module.
    """
    for module, found in widths.items():
        if len(found) > 1:
            each = " and ".join(f"{bits} bits ({name})" for bits, name in found.items())
            raise ValueError(f"{module}: its tensors would get {each}. Change overrides to treat them alike.")


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module computes something else than its class does, which one of another class would not."""
    # accelerate wraps a forward, and leaves that there where it takes its hook away.
    own = vars(module).get("_old_forward" if "_hf_hook" in vars(module) else "forward")
    function = getattr(own, "__func__", own)
    return own is not None and all(vars(kind).get("forward") is not function for kind in type(module).__mro__)


def is_apart(module: nn.Module) -> bool:
    """Whether a module's call is more than its class's forward: somebody listens, or it has its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks or _has_hook_of_its_own(module)
    everywhere = every_module._global_forward_hooks or every_module._global_forward_pre_hooks
    return bool(hooks or everywhere) or has_own_forward(module)


def _has_hook_of_its_own(module: nn.Module) -> bool:
    """Whether a module has a hook of accelerate's kind that is not one of accelerate, which move tensors."""
    hook = vars(module).get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))
    return hook is not None and any(type(one).__module__ != "accelerate.hooks" for one in hooks)


def is_silu(function: Any) -> bool:
    """Whether an activation is the one that kernels fuse, and nobody listens to it."""
    if function is F.silu:
        return True
    # The other is transformers' own since 5.23; importing it here would import transformers.
    kind = type(function)
    silu = getattr(kind, "forward", None) is nn.SiLU.forward or kind.__name__ == "SiLUActivation"
    return silu and not is_apart(function)


def names_of_modules(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of every module: what replaces it is to be found by each, and files may hold it under any."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Give the module that replaces another its hooks on calls; handles of the old one's remove them.

    And what somebody has put on a layer, which hooks may read.
    """
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
    if type(old) in (nn.Linear, nn.Embedding):
        usual = {"forward", *_usual_attributes(isinstance(old, nn.Linear))}  # `keep_device_hook` has that one
        own = {name: value for name, value in vars(old).items() if name not in usual and name[0] != "_"}
    else:
        own = {name: vars(old).get(name) if value is ... else value for name, value in _own(old).items()}
    if type(new) in (nn.Linear, nn.Embedding):
        vars(new).update(own)
    elif own:
        free = {name: value for name, value in own.items() if not hasattr(new, name)}
        vars(new).update(free, **{_OWN: own | dict.fromkeys(free, ...)})


def _own(module: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = vars(module).get(_OWN, {})
    return found


@functools.cache
def _usual_attributes(is_linear: bool) -> frozenset[str]:
    """What every linear layer, or every embedding, has."""
    return frozenset(vars((nn.Linear if is_linear else nn.Embedding)(1, 1, device="meta")))


def keep_device_hook(old: nn.Module, new: nn.Module) -> None:
    """Give a module accelerate's hook of the one that it replaces, which moves inputs to its device.

    Such a hook wraps `forward`, so its place is the module itself, once it has its weights.
    """
    hook = vars(old).get("_hf_hook")
    if hook is not None:
        from accelerate.hooks import add_hook_to_module  # it made the hook

        add_hook_to_module(new, hook)


def left_alone(model: nn.Module) -> dict[str, str]:
    """{module: why} of those that stay in 16 bits whatever the policy says, since others use their weights.

    Modules that transformers keeps in float32 (`_keep_in_fp32_modules`), with all inside them, and those
    whose weight is read by the code of another, which would find codes.
    """
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name in _kept_in_float32(module):
            found[prefix + name] = "transformers keeps it in float32"
        for name in _read_by(module):
            found[prefix + name] = f"{type(module).__name__} reads its weight"
    return found


def _kept_in_float32(module: nn.Module) -> Iterator[str]:
    """Names of the modules inside that a model of transformers, or a part of one, wants kept."""
    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = [
        re.escape(name).replace(r"\*", ".*") for key in lists for name in getattr(module, key, None) or ()
    ]
    if kept:
        pattern = re.compile(rf"(^|\.)({'|'.join(kept)})(\.|$)")
        names = (name for name, _ in module.named_modules(remove_duplicate=False))
        yield from filter(pattern.search, names)


def _read_by(module: nn.Module) -> Iterator[str]:
    """Names of the modules inside whose weight a module reads."""
    if isinstance(module, nn.TransformerEncoderLayer):  # its fast path, in evaluation
        yield from ("linear1", "linear2")
    for parent, layer in _READERS:
        if re.search(parent, type(module).__name__):
            names = (name for name, _ in module.named_modules(remove_duplicate=False))
            yield from (name for name in names if re.fullmatch(layer, name))
