"""What modules of a quantized model run in fewer launches than one for each of them."""

from __future__ import annotations

from torch import nn

from kbit.nn.gated_delta import merge_gated_delta
from kbit.nn.merged import merge_layers
from kbit.nn.norm import fuse_norms
from kbit.nn.residuals import fuse_residuals
from kbit.nn.router import fuse_routers
from kbit.nn.shared_expert import merge_shared_experts


def run_together(model: nn.Module) -> None:
    """Have norms, sums before them, routers, layers of one input and shared experts run by fewer kernels.

    And linear attention. In place, and in this order: sums are found by their norms, shared experts by their
    routers and MLPs.
    """
    fuse_norms(model)
    fuse_residuals(model)
    fuse_routers(model)
    merge_gated_delta(model)
    merge_layers(model)
    merge_shared_experts(model)
