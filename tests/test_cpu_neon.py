"""The NEON kernels on any CPU: compiled with stand-ins for ARM's intrinsics, beside the portable ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "neon_on_cpu"
CSRC = Path(__file__).parents[1] / "src" / "kbit" / "backends" / "cpu" / "csrc"
SOURCES = ("isa_neon", "isa_portable", "isa", "linear", "row_ops", "parallel")
COMPILER = os.environ.get("CXX") or "g++"
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi")


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is missing")
def test_they_give_what_the_portable_kernels_give(tmp_path: Path) -> None:
    program = tmp_path / "neon_against_portable"
    sources = [HERE / "neon_against_portable.cpp", *(CSRC / f"{name}.cpp" for name in SOURCES)]
    libraries = ("-lpthread", "-ldl")
    command = [COMPILER, *FLAGS, f"-I{HERE}", f"-I{CSRC}", "-o", program, *sources, *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = subprocess.run([program], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout
    assert run.stdout == "0 failures\n"
