"""CUDA graphs under transformers' server, which otherwise decodes kernel by kernel."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

# A graph of continuous batching is of so many tokens, or a multiple, and so many keys that they read.
# transformers' own, 64 and 16384, are for other attention: with that of PyTorch, a few short requests would
# spend most of a step on padding.
PADDING = {"q_padding_interval_size": 16, "kv_padding_interval_size": 1024}


def options(arguments: Sequence[str]) -> list[str]:
    """Options of `transformers serve` and the one by which it uses graphs, batched or request by request."""
    return [*arguments, "--cb-use-cuda-graph" if is_batched(arguments) else "--compile"]


def is_batched(arguments: Sequence[str]) -> bool:
    """Whether the server is asked for continuous batching."""
    return "--continuous-batching" in arguments


def use_cuda_graphs() -> None:
    """Have the server's models replay their steps, and continuous batching pad less for it.

    Raises:
        RuntimeError: there is no GPU.
    """
    import torch
    from transformers.cli.serving.utils import CBGenerateManager

    from kbit.cli.serve_loading import when_loaded
    from kbit.integrations.transformers.cuda_graphs import enable_cuda_graphs

    if not torch.cuda.is_available():
        raise RuntimeError("--cuda-graphs needs a GPU, and PyTorch finds none. Leave it out on a CPU.")
    when_loaded(enable_cuda_graphs)
    start = CBGenerateManager.__init__

    @functools.wraps(start)
    def started(self: Any, cb_config: Any = None) -> None:
        for name, size in PADDING.items():
            if cb_config is not None and not getattr(cb_config, name):
                setattr(cb_config, name, size)
        start(self, cb_config)

    CBGenerateManager.__init__ = started
