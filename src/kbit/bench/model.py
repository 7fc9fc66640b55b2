"""`kbit bench model`: decode and prefill of whole models of random weights, quantized and in bf16.

Arms are built one after the other, so each has the memory to itself, and run the same loop
(`kbit.bench.model_decode`). A mixture's bf16 arm runs transformers' two implementations that a CUDA graph can
record; the faster one is what quantized arms are compared with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kbit.bench import machine, model_build, model_decode, model_profile
from kbit.bench.moe_layer import recordable
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.compiled_layers import compiled_layers
from kbit.nn.fused_experts import is_experts

BASELINE = "bf16"
# In the names of arms whose GPUs add up in another way than by NCCL.
ALL_REDUCE = ", all-reduce "
# Of a device's memory, for weights: the rest is for caches, activations and graphs.
_FILL = 0.92

# (config, device, dtype, policy) -> a model, or this rank's part of one.
Builder = Callable[[Any, torch.device, torch.dtype, QuantizationPolicy | None], model_build.Built]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        batches: numbers of sequences decoded at once.
        prompt, steps: tokens of each sequence before, and per repetition while the clock runs.
        prefill: tokens of the prompt that is timed; 0 leaves that out.
        repeats: of both.
        compiled: torch.compile every block of the model, in every arm, with kernels that overlap.
        profiled: list the kernels of a step.
    """

    batches: Sequence[int] = (1, 4, 32)
    prompt: int = 128
    steps: int = 64
    prefill: int = 2048
    repeats: int = 7
    compiled: bool = False
    profiled: bool = False
    dtype: torch.dtype = torch.bfloat16


@dataclass
class DecodeRow:
    """One arm at one batch size on so many GPUs.

    `ms` is a step of all sequences; `reason`, why it was not a CUDA graph; `peak_bytes`, most memory
    allocated meanwhile, None on a CPU.
    """

    arm: str
    batch: int
    ms: float
    spread: float
    reason: str | None
    profile: dict[str, Any] | None = None
    gpus: int = 1
    peak_bytes: int | None = None

    @property
    def tokens_s(self) -> float:
        """Tokens per second of all sequences together."""
        return 1e3 * self.batch / self.ms


@dataclass
class ArmResult:
    """One way to hold the model: how large it is and how fast.

    Attributes:
        gpus: over so many the model is split; bytes are those of one of them.
        weight_bytes: of all parameters and buffers.
        build_peak_bytes, prefill_peak_bytes, run_peak_bytes: most memory allocated while building, in the
            prefill, and in all that ran, without the slower ways of a batch; None on a CPU.
        prefill_reason: why the prompt was read without a CUDA graph; None if it was read with one.
        absent: why the arm was left out; None if it was not.
        no_memory: what of it did not fit in the GPU's memory, such as "bf16 batched_mm, batch 4".
    """

    name: str
    weight_bytes: int = 0
    build_peak_bytes: int | None = None
    run_peak_bytes: int | None = None
    absent: str | None = None
    no_memory: list[str] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_ms: float | None = None
    prefill_reason: str | None = None
    decode: list[DecodeRow] = field(default_factory=list)
    gpus: int = 1
    prefill_peak_bytes: int | None = None

    @property
    def prefill_tokens_s(self) -> float | None:
        """Tokens of a prompt per second."""
        return 1e3 * self.prefill_tokens / self.prefill_ms if self.prefill_ms else None


def measure(
    config: Any,
    plan: Plan,
    device: torch.device,
    policies: dict[str, QuantizationPolicy | None],
    progress: Callable[[str], None] = lambda words: None,
    builder: Builder = model_build.build,
    gpus: int = 1,
) -> Iterator[ArmResult]:
    """Build and run every arm; yields each as it is done.

    Args:
        config: a transformers config.
        plan: see `Plan`.
        device: where.
        policies: name of an arm -> its policy; None for 16 bits.
        progress: told what is being done.
        builder: makes a model, or this rank's part of one.
        gpus: ranks that run the model together, each of which calls this.
    """
    for name, policy in policies.items():
        absent = _too_large(config, device, gpus) if policy is None else None
        if absent is not None:
            yield ArmResult(name, absent=absent, gpus=gpus)
            continue
        with model_build.freeing(device):
            progress(f"{name}: building")
            result = _run(name, builder(config, device, plan.dtype, policy), gpus, plan, device, progress)
        yield result


def _too_large(config: Any, device: torch.device, gpus: int) -> str | None:
    """Why a model does not fit in 16 bits, or None."""
    if device.type != "cuda":
        return None
    needed, (_, total) = model_build.sixteen_bit_bytes(config), torch.cuda.mem_get_info(device)
    if needed <= _FILL * total * gpus:
        return None
    have = "the GPU has" if gpus == 1 else f"{gpus} GPUs have"
    return f"its weights are {needed / 1e9:.0f} GB, {have} {gpus * total / 1e9:.0f} GB"


def _run(
    name: str,
    built: model_build.Built,
    gpus: int,
    plan: Plan,
    device: torch.device,
    progress: Callable[[str], None],
) -> ArmResult:
    model, result = built.model, ArmResult(name, built.weight_bytes, built.peak_bytes, gpus=gpus)
    if plan.prefill:
        progress(f"{name}: prefill")
        result.prefill_tokens = plan.prefill
        machine.reset_gpu_peak(device)
        timing = model_decode.prefill(model, plan.prefill, plan.repeats)
        result.prefill_ms, result.prefill_reason = timing.ms, timing.reason
        result.prefill_peak_bytes = machine.gpu_peak_bytes(device)
    for batch in plan.batches:
        for arm in ways(model, name, batch):
            progress(f"{arm}: {batch} sequences")
            machine.reset_gpu_peak(device)
            row = _decode_if_it_fits(model, arm, batch, plan, gpus)
            if row is not None:
                row.peak_bytes = machine.gpu_peak_bytes(device)
                result.decode.append(row)
            else:
                result.no_memory.append(f"{arm}, batch {batch}")
                torch.cuda.empty_cache()
    result.run_peak_bytes = kept_peak(result)
    return result


def kept_peak(result: ArmResult) -> int | None:
    """Most memory of an arm's prefill and, at each batch, of the fastest way, whose speed tables show."""
    fastest = {row.batch: row for row in sorted(result.decode, key=lambda row: -row.ms)}
    peaks = [result.prefill_peak_bytes, *(row.peak_bytes for row in fastest.values())]
    return max((peak for peak in peaks if peak is not None), default=None)


def ways(model: Any, name: str, batch: int) -> Iterator[str]:
    """The arm's name, or one for each implementation of 16-bit experts that a CUDA graph can record.

    The model has that implementation when its name comes.
    """
    if not any(is_experts(module) for module in model.modules()):
        yield name
        return
    for way in recordable(batch):
        model.set_experts_implementation(way)
        yield f"{name} {way}"


def _decode_if_it_fits(model: Any, arm: str, batch: int, plan: Plan, gpus: int) -> DecodeRow | None:
    try:
        return _decode(model, arm, batch, plan, gpus)
    except torch.OutOfMemoryError:
        if gpus > 1:  # the other ranks wait for this one
            raise
        return None


def _decode(model: Any, arm: str, batch: int, plan: Plan, gpus: int = 1) -> DecodeRow:
    loop = model_decode.DecodeLoop(model, batch, plan.prompt, plan.steps)
    loop.read_prompt()
    with compiled_blocks(model) if plan.compiled else contextlib.nullcontext():
        loop.warm_up()
        run, reason = loop.captured()
        timing = loop.measure(run, plan.repeats, reason)
        row = DecodeRow(arm, batch, timing.ms, timing.spread, reason, gpus=gpus)
        if plan.profiled:
            loop.rewind()
            replays = min(plan.steps, model_profile.REPLAYS)
            row.profile = model_profile.as_json(model_profile.profile(run, replays))
    return row


@contextlib.contextmanager
def compiled_blocks(model: Any) -> Iterator[None]:
    """Every layer of a model compiled by itself, for one batch size, and forgotten afterwards."""
    import torch._dynamo

    try:
        with compiled_layers(model, {}):
            yield
    finally:
        torch._dynamo.reset()


def baseline_ms(results: Iterable[ArmResult], gpus: int = 1) -> dict[int, float]:
    """Batch -> milliseconds of the fastest 16-bit arm on as many GPUs."""
    best: dict[int, float] = {}
    for result in results:
        if result.name == BASELINE and result.gpus == gpus:
            for row in result.decode:
                best[row.batch] = min(row.ms, best.get(row.batch, row.ms))
    return best


def vs_bf16(row: DecodeRow, results: Iterable[ArmResult]) -> float | None:
    """How many times as fast as 16 bits on as many GPUs; None where these were not measured."""
    base = baseline_ms(results, row.gpus)
    return base[row.batch] / row.ms if row.batch in base else None


def prefill_vs_bf16(result: ArmResult, results: Iterable[ArmResult]) -> float | None:
    """How many times as fast as 16 bits on as many GPUs a prompt is read; None where one was not measured."""
    bases = (r.prefill_ms for r in results if (r.name, r.gpus) == (BASELINE, result.gpus))
    base = next(bases, None)
    return base / result.prefill_ms if base and result.prefill_ms else None


def vs_one_gpu(row: DecodeRow, results: Iterable[ArmResult]) -> float | None:
    """How many times as fast as the same arm on one GPU; None where that was not measured."""
    rows = (other for result in results for other in result.decode)
    wanted = (row.arm.partition(ALL_REDUCE)[0], row.batch, 1)
    return next((other.ms / row.ms for other in rows if (other.arm, other.batch, other.gpus) == wanted), None)


def label(name: str, gpus: int) -> str:
    """An arm's name in tables."""
    return name if gpus == 1 else f"{name}, {gpus} GPUs"


def captured(reason: str | None) -> str:
    """Whether a CUDA graph was replayed, in tables: "yes", or the reason why not."""
    return "yes" if reason is None else reason


def as_json(results: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """Arms as JSON objects, with speeds and ratios written out for readers."""
    items = []
    for result in results:
        item = asdict(result) | {"name": label(result.name, result.gpus)}
        item["prefill_tokens_s"] = _rounded(result.prefill_tokens_s, 1)
        item["prefill_vs_bf16"] = _rounded(prefill_vs_bf16(result, results), 3)
        for row, written in zip(result.decode, item["decode"], strict=True):
            written |= {"arm": label(row.arm, row.gpus), "tokens_s": round(row.tokens_s, 2)}
            ratios = {"vs_bf16": vs_bf16(row, results), "vs_one_gpu": vs_one_gpu(row, results)}
            written |= {key: _rounded(ratio, 3) for key, ratio in ratios.items()}
        items.append(item)
    return items


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
