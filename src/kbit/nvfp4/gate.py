"""The gate: a lever off and on, every byte compared, with each other and with a stored reference."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import torch

from kbit.nvfp4.gemm import ACCUMULATIONS, CONTRACT_VERSION, check_accumulation, tiles_nvfp4
from kbit.nvfp4.kernels import kernels_for
from kbit.nvfp4.model import SMALL, WIDE, Levers, Sizes, TinyMoE
from kbit.nvfp4.moe import DEDUP
from kbit.nvfp4.record import Recorder, counting

TOGGLES = ("dedup", "fold", "tile")
STEPS = 4
REFERENCE = "gate_reference.json"
# "tc" may differ between architectures, so it has no stored bytes.
STORED = tuple(name for name in ACCUMULATIONS if name != "tc")
MODELS = {"small": SMALL, "wide": WIDE}
# Sequences of the wide model, at least and at most: float32 rows show another reduction tree of the norm one
# time in five or so, and more rows only take longer.
WIDE_BATCH = (8, 16)


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
    """Run the models with a lever off, then on in each of its ways.

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
    models = _models(device)
    for batch in tokens:
        offs: dict[Levers, Recorder] = {}
        for name, levers in ways:
            off_levers = Levers(row_scale=levers.row_scale, accum=accum)
            if off_levers not in offs:
                offs[off_levers] = _run(models, batch, steps, off_levers)
            off, on = offs[off_levers], _run(models, batch, steps, levers)
            stored = stored_digests(accum, batch, levers.row_scale) if steps == STEPS else None
            failure = _failure(off, on, name, stored)
            failure = failure or _wrong_counts(on, batch, steps, levers, name)
            failure = failure or _wrong_counts(off, batch, steps, off_levers, "off")
            compared = "off" if stored is None else "off and the stored reference"
            yield Verdict(name, batch, _fired(off, on), failure, on.digests(), compared)


def _ways(toggle: str, accum: str, device: str) -> Iterator[tuple[str, Levers]]:
    plain = Levers(accum=accum)
    rows = replace(plain, row_scale=True)
    if toggle == "dedup":
        for way in DEDUP[1:]:
            yield f"dedup={way}", replace(plain, dedup=way)
        for way in DEDUP[1:]:
            if way != "scatter":  # which stores no factors
                yield f"dedup={way} row_scale", replace(rows, dedup=way)
    elif toggle == "fold":
        yield "fold=on", replace(plain, fold=True)
        yield "fold=on dedup=indirect", replace(plain, fold=True, dedup="indirect")
    else:
        for tile in tiles_nvfp4(accum, device):
            yield f"tile={tile}", replace(plain, tile=tile)
        if accum == "exact":  # whose kernels for the layout need no order of sums
            yield "layout=tiled", replace(plain, tiled=True)
            yield "layout=tiled dedup=indirect row_scale", replace(rows, tiled=True, dedup="indirect")


@functools.cache
def _models(device: str = "cpu") -> dict[str, TinyMoE]:
    with _one_thread():
        return {name: TinyMoE(device, sizes) for name, sizes in MODELS.items()}


def _sequences(sizes: Sizes, batch: int) -> int:
    return max(WIDE_BATCH[0], min(WIDE_BATCH[1], batch)) if sizes is WIDE else batch


def _run(models: dict[str, TinyMoE], batch: int, steps: int, levers: Levers) -> Recorder:
    recorder = Recorder()
    for part, model in models.items():
        recorder.part = part
        with _one_thread(), counting(kernels_for(model.embedding), recorder.counts):
            model.generate(_sequences(model.sizes, batch), steps, levers, recorder)
    return recorder


def _expected_counts(sizes: Sizes, batch: int, steps: int, levers: Levers) -> Counter[str]:
    """What `counting` finds in a run whose levers do what they say."""
    norms, layers, pairs = steps * (sizes.layers + 1), steps * sizes.layers, batch * sizes.choices
    counts: Counter[str] = Counter()
    if levers.fold:
        counts.update({"folded norms": norms, "folded activations": layers})
    else:
        for_experts = pairs if levers.dedup == "off" else batch
        rows = norms * batch + layers * (for_experts + pairs)
        counts.update({"norms": norms, "activations": layers, "rows quantized": rows})
    if levers.dedup == "indirect":
        counts["products by row number"] = layers  # of gate and up
    elif levers.fold or levers.dedup == "gather":
        counts["rows gathered"] = layers * pairs
    elif levers.dedup == "scatter":
        counts["rows scattered"] = layers * pairs
    products = 2 * layers + steps
    if levers.tiled:
        counts["products with weights in tiles"] = products
    if levers.tile is not None:
        counts[f"products with tile {levers.tile}"] = products
    return counts


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


def _wrong_counts(run: Recorder, batch: int, steps: int, levers: Levers, name: str) -> str | None:
    expected: Counter[str] = Counter()
    for sizes in MODELS.values():
        expected += _expected_counts(sizes, _sequences(sizes, batch), steps, levers)
    for event in sorted({*expected, *run.counts}):
        if run.counts[event] != expected[event]:
            return f"{name} did something else: {event} {run.counts[event]}, expected {expected[event]}"
    return None


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


def stored_digests(accum: str, tokens: int, row_scale: bool = False) -> dict[str, str] | None:
    """The package's digests of a batch under a contract, with row scales or without; None if not stored."""
    if accum not in STORED:
        return None
    text = (resources.files("kbit.nvfp4") / REFERENCE).read_text(encoding="utf-8")
    version: dict[str, Any] = json.loads(text).get(str(CONTRACT_VERSION), {})
    return version.get(accum, {}).get(_arm(row_scale), {}).get(str(tokens))


def _arm(row_scale: bool) -> str:
    return "row_scale" if row_scale else "plain"


def make_reference(tokens: list[int]) -> dict[str, Any]:
    """The content of the stored reference for this contract version, from the CPU with every lever off."""
    models = _models()
    runs: dict[str, Any] = {}
    for accum, row_scale in itertools.product(STORED, (False, True)):
        levers = Levers(row_scale=row_scale, accum=accum)
        digests = {str(batch): _run(models, batch, STEPS, levers).digests() for batch in tokens}
        runs.setdefault(accum, {})[_arm(row_scale)] = digests
    return {str(CONTRACT_VERSION): runs}
