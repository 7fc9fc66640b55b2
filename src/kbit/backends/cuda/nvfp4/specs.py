"""Every NVFP4 kernel, for the registry in `kbit.backends.cuda.variants`."""

from __future__ import annotations

from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import exact, exact_wgmma, folds, moe, products, rows


def specs(arch: str) -> list[KernelSpec]:
    """The kernels that are ever launched on an architecture, such as "90a"."""
    common = [*rows.specs(), *folds.specs(), *products.specs(), *exact.specs(), *moe.specs()]
    return [*common, *(exact_wgmma.specs() if exact_wgmma.refusal(0, arch) is None else [])]
