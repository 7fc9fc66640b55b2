"""The gate: a lever off and on, every byte compared, with each other and with a stored reference."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from kbit.nvfp4.gemm import ACCUMULATIONS, CONTRACT_VERSION, check_accumulation, tiles_nvfp4
from kbit.nvfp4.model import Levers, TinyMoE
from kbit.nvfp4.moe import DEDUP
from kbit.nvfp4.record import Recorder

TOGGLES = ("dedup", "fold", "tile")
STEPS = 4
REFERENCE = "gate_reference.json"
# "tc" may differ between architectures, so it has no stored bytes.
STORED = tuple(name for name in ACCUMULATIONS if name != "tc")


@dataclass(frozen=True)
class Verdict:
    """Whether one lever changed a byte at one batch size.

    Attributes:
        lever: what was on, such as "dedup=gather".
        tokens: sequences in the batch.
        fired: what the lever did, from both runs' counts.
        failure: why the gate does not hold; None if it does.
        digests: {tensor: SHA-256} of the run with the lever on.
        compared: what the bytes were compared with.
    """

    lever: str
    tokens: int
    fired: str
    failure: str | None
    digests: dict[str, str]
    compared: str


def run_gate(
    toggle: str, tokens: list[int], accum: str = "exact", device: str = "cpu", steps: int = STEPS
) -> Iterator[Verdict]:
    """Run the model with a lever off, then on in each of its ways.

    Args:
        toggle: "dedup", "fold" or "tile".
        tokens: batch sizes.
        accum: the accumulation contract.
        device: "cpu" or "cuda".
        steps: tokens to decode; only STEPS has a stored reference.

    Yields:
        A verdict for each batch size and way.

    Raises:
        ValueError: an argument does not fit.
    """
    check_accumulation(accum, "gate")
    if toggle not in TOGGLES:
        raise ValueError(f"gate: toggle must be one of {', '.join(TOGGLES)}, got {toggle!r}.")
    if not tokens or min(tokens) < 1 or steps < 1:
        raise ValueError(f"gate: tokens and steps must be at least 1, got {tokens} and {steps}.")
    ways = list(_ways(toggle, accum, device))
    if not ways:
        raise ValueError(f"gate: {device} has no choice of tile under {accum}. Use --accum exact.")
    with _one_thread():
        model = TinyMoE(device)
    for batch in tokens:
        stored = stored_digests(accum, batch) if steps == STEPS else None
        off = _run(model, batch, steps, Levers(accum=accum))
        for name, levers in ways:
            on = _run(model, batch, steps, levers)
            failure = _failure(off, on, name, stored)
            compared = "off" if stored is None else "off and the stored reference"
            yield Verdict(name, batch, _fired(off, on), failure, on.digests(), compared)


def _ways(toggle: str, accum: str, device: str) -> Iterator[tuple[str, Levers]]:
    if toggle == "dedup":
        for way in DEDUP[1:]:
            yield f"dedup={way}", Levers(dedup=way, accum=accum)
    elif toggle == "fold":
        yield "fold=on", Levers(fold=True, accum=accum)
        yield "fold=on dedup=indirect", Levers(fold=True, dedup="indirect", accum=accum)
    else:
        for tile in tiles_nvfp4(accum, device):
            yield f"tile={tile}", Levers(tile=tile, accum=accum)
        if accum == "exact":  # whose kernels for the layout need no order of sums
            yield "layout=tiled", Levers(tiled=True, accum=accum)


def _run(model: TinyMoE, batch: int, steps: int, levers: Levers) -> Recorder:
    recorder = Recorder()
    with _one_thread():
        model.generate(batch, steps, levers, recorder)
    return recorder


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors here are small: on a busy machine two threads that wait for each other took 18 times longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fired(off: Recorder, on: Recorder) -> str:
    """What changed in the counts: the proof that the lever was pulled."""
    names = sorted({*off.counts, *on.counts})
    changes = [(name, off.counts[name], on.counts[name]) for name in names]
    return ", ".join(f"{name} {before} -> {after}" for name, before, after in changes if before != after)


def _failure(off: Recorder, on: Recorder, lever: str, stored: dict[str, str] | None) -> str | None:
    if not _fired(off, on):
        return f"{lever} did not fire: both runs did the same"
    difference = off.first_difference(on)
    if difference is not None:
        return f"off and on differ first in {difference}"
    digests = on.digests()
    if stored is not None and stored != digests:
        name = next(name for name in (*digests, *stored) if digests.get(name) != stored.get(name))
        return f"{name} differs from the stored reference of contract version {CONTRACT_VERSION}"
    return None


def stored_digests(accum: str, tokens: int) -> dict[str, str] | None:
    """The package's digests of a batch under a contract; None where none are stored."""
    if accum not in STORED:
        return None
    text = (resources.files("kbit.nvfp4") / REFERENCE).read_text(encoding="utf-8")
    version: dict[str, Any] = json.loads(text).get(str(CONTRACT_VERSION), {})
    return version.get(accum, {}).get(str(tokens))


def make_reference(tokens: list[int]) -> dict[str, Any]:
    """The content of the stored reference for this contract version, from the CPU with every lever off."""
    with _one_thread():
        model = TinyMoE()
    runs = {
        accum: {str(batch): _run(model, batch, STEPS, Levers(accum=accum)).digests() for batch in tokens}
        for accum in STORED
    }
    return {str(CONTRACT_VERSION): runs}
