"""Every kernel there is, for `kbit compile` and for the test that compiles them all."""

from __future__ import annotations

from kbit.backends.cuda import (
    ahead,
    attention,
    delta_rule,
    gated_delta,
    grouped,
    latent,
    latent_prompts,
    mma_config,
    norm_logits,
    ranks,
    resident,
    router_logits,
    routing,
    rows,
    stream_config,
    wgmma,
    wgmma_config,
)
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import specs as nvfp4

_AROUND = (routing, router_logits, norm_logits, latent_prompts, ranks, *ahead.BETWEEN)  # the products
_KIB = 1024
# Most shared memory of a block, by architecture (CUDA C++ Programming Guide, table of compute capabilities);
# others, from Hopper on, have as much as Hopper.
_SHARED_BYTES = {"80": 163 * _KIB, "86": 99 * _KIB, "87": 163 * _KIB, "89": 99 * _KIB, "120": 99 * _KIB}


def all_specs(arch: str) -> list[KernelSpec]:
    """The kernels that are ever launched on an architecture, such as "90a"."""
    number = arch.rstrip("af")
    shared = _SHARED_BYTES.get("120" if number.startswith("12") else number, wgmma_config.SHARED_BYTES)
    hopper = wgmma_config.specs() if arch == wgmma.ARCH else []
    few_experts = resident.specs(shared) if arch == resident.ARCH else []
    products = [*stream_config.specs(shared, arch), *grouped.specs(shared), *few_experts, *hopper]
    products += mma_config.specs(shared, arch)
    around = [
        *gated_delta.specs(arch),
        *delta_rule.specs(shared),
        *latent.specs(shared),
        *attention.specs(arch, shared),
    ]
    around += [*(spec for module in _AROUND for spec in module.specs())]
    return [*rows.specs(), *around, *products, *nvfp4.specs(arch)]
