"""Every Python block of the README runs, on a tiny random model; its tables show the committed results."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny_models import build

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_blocks_run(block, tmp_path, monkeypatch):
    build("llama", torch.float32).save_pretrained(tmp_path / "model")
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
