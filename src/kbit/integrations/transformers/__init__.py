"""transformers: a quantization config, a quantizer, and their registration.

`AutoModelForCausalLM.from_pretrained(folder, quantization_config=kbit.KbitConfig(bits=4))` quantizes while it
loads; `save_pretrained` and `from_pretrained` round-trip the result. Importing this package does not import
transformers; asking it for `KbitConfig` does.

    config, quantizer, autoregister  what transformers knows, calls and finds
    in_memory                        what this quantizer and that of NVFP4 share
    config_parts                     configs that a config holds
    key_mapping                      what else tensors are called in the files of a load
    inference_loads                  loads within `torch.inference_mode`
    sections                         loads of codes by a config that does not say kbit, or is damaged
    plan, refusals, names            which parameters are quantized, by the names in the files; what cannot be
    placement, operations            empty layers before a load, and what the load does with tensors
    drawn                            layers that the weights turn out to hold nothing of
    report, rehearsal                what stayed in 16 bits; what a load would miss, from the headers
    counting                         `num_parameters`
    tied_modules, stored_ties        which of them share a weight, by all their names; what files hold twice
    saving, inplace, resizing        saving; models quantized in place; `resize_token_embeddings`
    tying, drafts                    `tie_weights`; heads of drafts that have another tokenizer
    cache_argument               what a cache is called in arguments and outputs, which differs by release
    cuda_graphs, recordings      decoding steps of `generate`, replayed; what recordings rest on
    next_steps                   those that follow each other, whose inputs are made on the GPU
    preconditions                what they rest on in a model
    prompts, static_caches       its prompts, padded and replayed; the caches that both write to
    prompt_rests, prompt_inputs  prompts whose beginning a cache holds; what both ask of inputs and caches
    own_methods                  methods that a model has in place of its class's
    last_caches                  which of these are given to `generate` again
    prefix_caching, kept_caches, kept_calls  prompts that begin as earlier ones did; what is kept of which
    left_padding                 prompts of several lengths in one batch
    late_masks, additive_masks   masks that such steps make themselves, as what is added to scores
    step_kernels, attention      what such steps run: fewer kernels, no copies of the cache
    angles                       those of rotary embeddings, in one kernel
    attention_heads              what is between attention's projections and attention, in one kernel
    latent_attention             multi-head latent attention, of latents that are not expanded
    latent_prompts               that of prompts, whose latents are
    attention_steps              what both ask of layers and caches, and how they try a class
    linear_attention             that of Qwen3-Next, in few kernels
    stop_checks                  ends of answers, looked for a step late
    compiled_layers, token_times torch.compile for them; when their tokens come
    parallel, parallel_layers, sharded, collectives  models that are split over ranks
    failures                     errors on one of these, which all raise
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbit.integrations.transformers.config import KbitConfig

__all__ = ["KbitConfig"]


def __getattr__(name: str) -> Any:
    if name == "KbitConfig":
        from kbit.integrations.transformers.config import KbitConfig

        return KbitConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
