"""Tests marked `gpu` are left out without a GPU; torch.compile stops at the graph without a C++ compiler.

Random numbers begin at the same seed in every test: what fails once fails again.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sysconfig
from pathlib import Path

import pytest
import torch

# Inductor builds C++ with these. Without them a whole graph is still asked for, and run.
COMPILER = os.environ.get("CXX") or "g++"
INDUCTOR_BUILDS = shutil.which(COMPILER) and Path(sysconfig.get_path("include"), "Python.h").is_file()
if not INDUCTOR_BUILDS:
    torch.compile = functools.partial(torch.compile, backend="aot_eager")


if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    # Or each worker's references, and each process that it starts, would take every core.
    threads = max(1, (os.cpu_count() or 1) // int(workers))
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))

# A shell's background jobs ignore SIGINT, nohup's SIGHUP; processes that tests start would inherit that.
for number in (signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# Models of earlier tests hold their graphs in cycles; a graph that is collected during a capture ends it.
torch.compiler.config.force_cudagraph_gc = True


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def sources_of_models() -> list[str]:
    """The source of every model of transformers."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    return [file.read_text() for file in sorted(folder.glob("*/modeling_*.py"))]


@pytest.fixture
def small_heads(monkeypatch):
    """Linear attention of tiny models goes by kernels, and on a CPU, too."""
    from kbit.backends.cuda import gated_delta
    from kbit.nn import gated_delta as layers

    monkeypatch.setattr(layers, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(gated_delta, "DIM", 16)


@pytest.fixture
def tiles_pay():
    """As if the CPU had kernels that multiply tiles."""
    from kbit.ops import forms

    before = forms.set_rule(lambda op, device: device.type == "cpu")
    yield
    forms.set_rule(before)


@pytest.fixture
def own_compilations():
    """A model's code may be compiled a few times only, by all tests of a process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def small_shards(monkeypatch) -> None:
    """`kbit quantize` writes a tiny model in many shards."""
    from kbit.integrations.streaming import jobs
    from quantize_runs import SMALL_SHARD

    monkeypatch.setattr(jobs, "SHARD_BYTES", SMALL_SHARD)


def pytest_report_header() -> str | None:
    if INDUCTOR_BUILDS:
        return None
    return f"torch.compile: without inductor, which needs a C++ compiler ({COMPILER}) and Python's headers"


def pytest_collection_modifyitems(config, items) -> None:
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
