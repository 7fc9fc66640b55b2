"""What modules of a quantized model run in fewer launches than one for each of them."""

from __future__ import annotations

from torch import nn

from kbit.nn.merged import merge_layers
from kbit.nn.router import fuse_routers
from kbit.nn.shared_expert import merge_shared_experts


def run_together(model: nn.Module) -> None:
    """Have routers, layers of one input and shared experts run by fewer kernels, in place; in this order."""
    fuse_routers(model)
    merge_layers(model)
    merge_shared_experts(model)
