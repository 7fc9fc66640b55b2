"""torch.compile of decoder layers: of the many small kernels of a decoding step, few are left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch


def decoder_layers(model: Any) -> list[torch.nn.Module]:
    """The layers of a causal language model's decoder.

    Raises:
        TypeError: it has none.
    """
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise TypeError(f"{type(model).__name__} has no decoder with layers that could be compiled.")
    return list(layers)


@contextlib.contextmanager
def compiled_layers(model: Any, compiled: dict[torch.nn.Module, Any]) -> Iterator[None]:
    """Every decoder layer runs as compiled for its inputs' shapes; `compiled` keeps them for the next time.

    A layer's number is a constant of its code, so each is traced; their equal graphs are built once.
    """
    import torch._dynamo

    layers, config = decoder_layers(model), torch._dynamo.config
    before = [layer._compiled_call_impl for layer in layers]
    limits = {"recompile_limit": 8 * len(layers), "accumulated_recompile_limit": 64 * len(layers)}
    for layer in layers:
        if layer not in compiled:
            layer.compile(fullgraph=True, dynamic=False)
            compiled[layer] = layer._compiled_call_impl
        layer._compiled_call_impl = compiled[layer]
    try:
        with config.patch({name: max(limit, getattr(config, name)) for name, limit in limits.items()}):
            yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer._compiled_call_impl = own


def overlap_kernels() -> None:
    """Have torch.compile's kernels start while those in front of them end, from now on, on Hopper and newer.

    To be called before any kernel of kbit is loaded, which then lets them.
    """
    import torch._inductor.config as config

    os.environ["TORCHINDUCTOR_ENABLE_PDL"] = "1"  # of processes that are started
    if hasattr(config.triton, "enable_pdl"):
        config.triton.enable_pdl = True
