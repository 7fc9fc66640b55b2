"""Every Python block of the README runs, on a tiny random model; its tables show the committed results."""

import importlib.util
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import build_with_tokenizer

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    build_with_tokenizer("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), init_globals={"folder": tmp_path / "model"})


def test_there_are_blocks():
    assert len(BLOCKS) >= 2


def test_tables_show_the_results():
    command = [sys.executable, str(ROOT / "tools" / "render_readme.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


# -- the GPU's figures, whose file may be missing ------------------------------------------------------------


@pytest.fixture
def rendering(tmp_path, monkeypatch):
    """tools/render_readme.py on a README of its own, and results without those of the GPU."""
    spec = importlib.util.spec_from_file_location("render_readme", ROOT / "tools" / "render_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "README", tmp_path / "README.md")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    module.README.write_text(
        "fast<!-- gpu_claim -->old<!-- /gpu_claim -->.\n<!-- gpu -->\nold\n<!-- /gpu -->\n"
        "Slow.<!-- gpu_losses -->old<!-- /gpu_losses -->\n"
    )
    return module


def rendered(module, monkeypatch) -> str:
    """The README written, and found up to date."""
    for argument in ("--write", "--check"):
        monkeypatch.setattr(sys, "argv", ["render_readme.py", argument])
        assert module.main() == 0
    return module.README.read_text()


def test_without_the_gpu_file_its_sections_say_nothing(rendering, monkeypatch):
    text = rendered(rendering, monkeypatch)
    assert re.sub("<!-- .*? -->", "", text) == "fast.\n\nSlow.\n"


def test_gpu_sections_show_the_file(rendering, monkeypatch):
    def row(tokens: int, speedup: float, **other: object) -> dict[str, object]:
        layer = {"shape": "l70b", "in_features": 8192, "out_features": 28672, "dtype": "fp16"}
        cell = {"rows": tokens, "bits": 4, "kernel": "kbit", "us": 40.0, "gb_s": 3000.0, "vs_fp16": speedup}
        return layer | cell | other

    rows = [row(1, 3.456), row(64, 0.999), row(256, 0.994), row(1024, 0.71), row(4096, 0.5, dtype="bf16")]
    rows += [row(1, 9.0, bits=2), row(1, 9.0, kernel="stream"), row(2, 0.1), row(8, 0.2, shape="unlisted")]
    machine = {"gpu": "NVIDIA H200", "driver": "580", "cuda": "13.0", "torch": "2.11"}
    result = {"machine": machine, "read_bandwidth_gb_s": 4000.0, "rows": rows}
    (rendering.RESULTS / rendering.GPU_FILE).write_text(json.dumps(result))
    text = rendered(rendering, monkeypatch)
    assert (
        "fast<!-- gpu_claim -->, and 3.5 times as fast as in float16 on an H200<!-- /gpu_claim -->." in text
    )
    assert "| 8192 → 28672 (l70b) | 3.46 | 1.00 | 0.99 | 0.71 |" in text
    assert "takes 40.0 µs: 3000 GB/s of packed weights, 75% of the 4000 GB/s" in text
    assert "2 of the table's 4 cells lose to float16 cuBLAS, from M=256 on" in text
    assert "8192 → 28672 at M=1024, 0.71 times as fast.<!--" in text
