"""Inside kbit.nvfp4 imports point one way too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kbit.nvfp4

FOLDER = Path(kbit.nvfp4.__file__).parent
BELOW = ("exact", "formats", "reference", "product_kernels", "kernels", "quantize", "readers", "gemm")
LAYERS = (*BELOW, "moe", "expert_products", "no_gradient", "folds", "layers", "record", "model", "gate")


def layer_of(path: Path) -> str:
    return path.relative_to(FOLDER).with_suffix("").parts[0]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_imports_point_downwards(path: Path) -> None:
    layer = layer_of(path)
    text = path.read_text()
    imported = re.findall(r"from kbit\.nvfp4\.(\w+)", text)
    for names in re.findall(r"from kbit\.nvfp4 import (\w+(?:, \w+)*)", text):
        imported += names.split(", ")
    if layer == "__init__":
        return
    for target in imported:
        assert LAYERS.index(target) <= LAYERS.index(layer), f"{path.name} of {layer} imports {target}"
