"""`kbit quantize --calibrate`: a model's codes by what a text feeds its layers."""

from __future__ import annotations

import hashlib
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kbit.cli.consoles import Console
from kbit.cli.model_folder import load_model
from kbit.cli.texts import calibration_samples, check_ids
from kbit.integrations.devices import find_device

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kbit.format import QuantizationPolicy
    from kbit.integrations.streaming import Codes

LOG_SECONDS = 30.0  # between two lines of a log


def calibrated(source: Path, policy: QuantizationPolicy, text: str, file: Path, device: str) -> Codes:
    """Codes that a whole model is to be loaded for; the text, which was read from `file`, is encoded now.

    Raises:
        OSError: the folder has no tokenizer.
        ValueError: the text has fewer than two tokens; no such device, or more than one.
    """
    from kbit.integrations.streaming import Codes

    place = find_device(device, "one of cpu, cuda or cuda:1 with --calibrate")
    samples = calibration_samples(source, text, file)

    def make() -> Mapping[str, torch.Tensor]:
        from kbit import quantize_model
        from kbit.integrations.transformers.saving import stored_parts

        model = load_model(source, device=str(place))
        check_ids(source, samples, model)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("calibrating layers", total=None)
            told = time.monotonic()

            def show(done: int, total: int, name: str) -> None:
                nonlocal told
                bar.update(task, completed=done, total=total)
                if not bar.console.is_terminal and time.monotonic() - told > LOG_SECONDS:  # a log has no bar
                    told = time.monotonic()
                    bar.console.print(f"calibrating layers: {done} of {total}")

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the plan of the folder has warned of the same
                quantize_model(model, policy, show, list(samples.to(place).split(1)))
        return stored_parts(model)

    # Sums of activations differ from device to device and from one version of torch to another.
    key = [hashlib.sha256(samples.numpy().tobytes()).hexdigest(), place.type, torch.__version__]
    return Codes(" ".join(key), make)
