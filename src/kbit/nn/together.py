"""What modules of a quantized model run in fewer launches than one for each of them."""

from __future__ import annotations

from torch import nn

from kbit.nn.merged import merge_layers
from kbit.nn.norm import fuse_norms
from kbit.nn.router import fuse_routers
from kbit.nn.shared_expert import merge_shared_experts


def run_together(model: nn.Module) -> None:
    """Have norms, routers, layers of one input and shared experts run by fewer kernels, in place.

    In this order: shared experts are found by their routers and MLPs.
    """
    fuse_norms(model)
    fuse_routers(model)
    merge_layers(model)
    merge_shared_experts(model)
