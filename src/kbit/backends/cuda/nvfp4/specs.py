"""Every NVFP4 kernel, for the registry in `kbit.backends.cuda.variants`."""

from __future__ import annotations

from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import exact, folds, moe, products, rows


def specs() -> list[KernelSpec]:
    """The kernels, the same for every architecture."""
    return [*rows.specs(), *folds.specs(), *products.specs(), *exact.specs(), *moe.specs()]
