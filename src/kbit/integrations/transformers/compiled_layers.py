"""torch.compile of decoder layers: of the many small kernels of a decoding step, few are left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.nn.standing_in import standing_in


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

    In every thread, until the last such context is left. A layer's number is a constant of its code, so each
    is traced; their equal graphs are built once.
    """
    import torch._dynamo

    layers, config = decoder_layers(model), torch._dynamo.config
    limits = {"recompile_limit": 8 * len(layers), "accumulated_recompile_limit": 64 * len(layers)}
    with contextlib.ExitStack() as stack:
        for layer in layers:
            if layer not in compiled:
                compiled.setdefault(layer, torch.compile(layer._call_impl, fullgraph=True, dynamic=False))
            stack.enter_context(standing_in(layer, "_compiled_call_impl", _another(compiled[layer])))
        larger = {name: max(limit, getattr(config, name)) for name, limit in limits.items()}
        stack.enter_context(config.patch(larger))
        yield


def _another(function: Any) -> Callable[[Any], Any]:
    return lambda own: function


def overlap_kernels() -> None:
    """Have torch.compile's kernels start while those in front of them end, from now on, on Hopper and newer.

    To be called before any kernel of kbit is loaded, which then lets them.
    """
    import torch._inductor.config as config

    os.environ["TORCHINDUCTOR_ENABLE_PDL"] = "1"  # of processes that are started
    if hasattr(config.triton, "enable_pdl"):
        config.triton.enable_pdl = True
