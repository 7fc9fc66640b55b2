"""vLLM: a plugin by which `vllm serve` runs k-bit checkpoints.

vLLM asks for `register` in each of its processes, by an entry point; nothing is to be imported or set. Every
other module here imports vLLM.

    config       what vLLM knows of a checkpoint: which layers are quantized, and by which method each runs
    stored       which modules a checkpoint holds quantized, from its headers
    parameters   parameters that vLLM's loaders fill, and whether they did
    linear       linear layers, merged ones included
    vocabulary   embeddings and output heads, tied ones included
    experts      fused experts
    decoding     weights of layers that vLLM does not quantize, decoded while they are loaded
"""

from __future__ import annotations

import logging

# The first whose experts are a module of their own, `RoutedExperts`.
OLDEST_VLLM = "0.32"


def register() -> None:
    """Make vLLM know `quant_method: kbit`. Calling it again changes nothing.

    A vLLM that is too old keeps working for other checkpoints: what is missing is logged.
    """
    try:
        from kbit.integrations.vllm import (
            config,  # noqa: F401  (imported for what it registers)
            decoding,
        )
    except ImportError as error:
        logging.getLogger("vllm.kbit").warning(
            "kbit checkpoints will not load: kbit's plugin needs vLLM %s or newer (%s).", OLDEST_VLLM, error
        )
        return
    decoding.decode_what_is_plain()
