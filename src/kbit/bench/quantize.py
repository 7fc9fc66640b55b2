"""`kbit bench quantize`: weights per second from a checkpoint on disk to a quantized one.

The checkpoint is random, written first, and dropped from the system's memory before every run. Kernels are
compiled before, and CUDA started, as in a run of minutes they do not count.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kbit import ops
from kbit.bench import random_models
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.streaming import quantize_checkpoint

PROJECTED_WEIGHTS = 80e9


@dataclass(frozen=True)
class Run:
    """One run: how many workers, on which devices, what it read and wrote, and how long it took.

    Of `weights`, `copied` ones stay as they are: embeddings, the head, norms.
    """

    jobs: int
    devices: tuple[str, ...]
    weights: int
    bytes_in: int
    bytes_out: int
    seconds: float
    copied: int = 0

    @property
    def quantized_weights(self) -> int:
        """Those that are not only copied."""
        return self.weights - self.copied

    @property
    def weights_per_second(self) -> float:
        """Read, quantized and written; the time is that of the copied ones, too."""
        return self.quantized_weights / self.seconds

    @property
    def seconds_for_80b(self) -> float:
        """What 80 billion quantized weights would take at this speed."""
        return PROJECTED_WEIGHTS / self.weights_per_second


def measure(
    name: str,
    layers: int | None,
    policy: QuantizationPolicy,
    jobs: Sequence[int],
    devices: Sequence[str],
    folder: Path,
    progress: Callable[[str], object] = lambda words: None,
) -> Iterator[Run]:
    """Write a checkpoint of random weights, and quantize it with each number of workers; yields every run.

    Args:
        name, layers: see `model_build.load_config`.
        policy: what is quantized, and how.
        jobs: shards in work at a time; one run each.
        devices: where to quantize; workers take them in turn.
        folder: where both checkpoints go, and are removed from again.
        progress: told what is being done.
    """
    source, target = folder / "source", folder / "quantized"
    progress("writing a checkpoint")
    random_models.write(name, layers, source, torch.device(devices[0]))
    warm_up(policy, devices)
    try:
        for count in jobs:
            random_models.forget(source)
            progress(f"quantizing, {count} shards at a time")
            report = quantize_checkpoint(source, target, policy, jobs=count, devices=devices)
            sizes = (report.written_weights, report.bytes_in, report.bytes_out)
            shutil.rmtree(target)
            copied = report.weights - report.quantized_weights
            yield Run(count, tuple(devices), *sizes, report.seconds, copied)
    finally:
        shutil.rmtree(source)


def warm_up(policy: QuantizationPolicy, devices: Sequence[str]) -> None:
    """Quantize a small matrix on every device."""
    for device in devices:
        for bits in policy.widths():
            w = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
            ops.quantize(w, bits, policy.codebook_for(bits), policy.absmax_format, policy.search)


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The runs as JSON values, with the figures that a table shows."""
    return [
        vars(run)
        | {
            "quantized_weights": run.quantized_weights,
            "weights_per_second": run.weights_per_second,
            "seconds_for_80b": run.seconds_for_80b,
        }
        for run in runs
    ]
