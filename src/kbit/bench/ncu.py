"""Kernel-only times from Nsight Compute: `kbit bench kernels --timer ncu` runs itself again under ncu.

What differs from graph replays: launch gaps, and what programmatic dependent launch hides, are left out; a
kernel is timed alone, from its first instruction to its last. Caches are left as they are (ncu would flush
them), so that weights are cold by rotation and activations warm, as in the other timer. So are clocks.

Calls are told apart by a marker kernel that the recording run launches before each, not by ranges, whose
CSV columns change between ncu's versions.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kbit.bench.gpu_timing import Arm, GpuTiming, Key, environment, summarize, warm_up
from kbit.bench.kernel_rows import KernelRow, from_json
from kbit.bench.repeats import check_repeats

METRIC = "gpu__time_duration.sum"
# torch.cuda._sleep's kernel.
MARKER = "spin_kernel"
# ncu is seldom on the PATH.
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute")


@torch.no_grad()
def record(arms: Mapping[Key, Arm], repeats: int) -> dict[Key, GpuTiming]:
    """A `Timer` for the process that ncu watches: marks and makes `repeats` calls of each arm."""
    check_repeats(repeats)
    for arm in arms.values():
        warm_up(arm)
    torch.cuda.profiler.start()
    for arm in arms.values():
        with environment(arm.environment):
            for index in range(repeats):
                torch.cuda._sleep(1)
                arm.calls[index % len(arm.calls)]()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return {key: GpuTiming(0.0, 0.0) for key in arms}


def find() -> str:
    """Path of the ncu program.

    Raises:
        ValueError: it is not installed.
    """
    found = shutil.which("ncu")
    if found:
        return found
    direct, versions = (Path(place) for place in PLACES)
    candidates = [direct, *sorted(versions.glob("*/ncu"), reverse=True)]
    for path in candidates:
        if os.access(path, os.X_OK):
            return str(path)
    raise ValueError(
        "--timer ncu: Nsight Compute's ncu is neither on the PATH nor in "
        f"{' or '.join(PLACES)}. Install it, or use --timer graph."
    )


def command(ncu: str, log: Path, arguments: Sequence[str]) -> list[str]:
    """The command line that runs `python -m kbit ARGUMENTS` under ncu."""
    options = ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
    output = ["--metrics", METRIC, "--csv", "--print-units", "base", "--log-file", str(log)]
    return [ncu, *options, *output, sys.executable, "-m", "kbit", *arguments]


def parse(lines: Iterable[str]) -> list[float]:
    """Microseconds of every marked call in order, from ncu's CSV: the sum of the kernels after its marker."""
    table = [line for line in lines if line.startswith('"')]
    calls: list[float] = []
    for row in csv.DictReader(table):
        if row["Metric Name"] != METRIC:
            continue
        if MARKER in row["Kernel Name"]:
            calls.append(0.0)
        elif calls:
            calls[-1] += _microseconds(row["Metric Value"], row["Metric Unit"])
    return calls


def _microseconds(value: str, unit: str) -> float:
    factors = {"n": 1e-3, "u": 1.0, "m": 1e3, "s": 1e6}
    return float(value.replace(",", "")) * factors[unit[0]]


def fill(rows: Sequence[KernelRow], calls: Sequence[float], repeats: int) -> list[KernelRow]:
    """Rows of the recording run with the times of their calls.

    Raises:
        ValueError: ncu saw another number of calls than the rows stand for.
    """
    if len(calls) != len(rows) * repeats:
        raise ValueError(
            f"--timer ncu: {len(rows)} rows of {repeats} calls were run, ncu saw {len(calls)} calls. "
            f"Try fewer shapes; `--timer graph` needs no ncu."
        )
    result = []
    for index, row in enumerate(rows):
        timing = summarize(calls[index * repeats : (index + 1) * repeats])
        result.append(replace(row, us=timing.us, spread=timing.spread))
    return result


def run(arguments: Sequence[str], repeats: int) -> tuple[dict[str, Any], list[KernelRow]]:
    """Run `kbit bench kernels` again under ncu.

    Args:
        arguments: command line after `kbit`, without --timer and --json.
        repeats: calls of each arm, as in `arguments`.

    Returns:
        the recording run's result file, and its rows with kernel times.

    Raises:
        ValueError: ncu is missing or failed; the message ends with what it said.
    """
    ncu = find()
    with tempfile.TemporaryDirectory(prefix="kbit-ncu-") as folder:
        log, file = Path(folder, "ncu.csv"), Path(folder, "rows.json")
        recording = [*arguments, "--timer", "ncu-record", "--json", str(file)]
        done = subprocess.run(command(ncu, log, recording), capture_output=True, text=True, check=False)
        said = (log.read_text() if log.is_file() else "") + done.stdout + done.stderr
        if done.returncode or not file.is_file():
            tail = [line for line in said.splitlines() if line and not line.startswith('"')][-5:]
            raise ValueError(f"--timer ncu: {ncu} ended with code {done.returncode}: {' / '.join(tail)}")
        result = json.loads(file.read_text())  # its rows have no times yet
        rows = from_json(result["rows"])
        return result, fill(rows, parse(log.read_text().splitlines()), repeats)
