"""`kbit bench train`: a LoRA training step on a model held quantized and in bf16.

Arms are built one after the other, so each has the memory to itself, and train the same adapters on the same
random tokens: forward, backward, and a step of AdamW on the adapters. A fused expert's adapter is peft's own
in the bf16 arm (it adds B A to the 16-bit parameter) and kbit's in the others (it acts on activations).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kbit.bench import machine, model_build
from kbit.bench.model import BASELINE
from kbit.bench.repeats import MIN_REPEATS, check_repeats, median_and_spread
from kbit.format.policy import QuantizationPolicy
from kbit.nn.fused_experts import is_experts

ATTENTION = "q_proj|k_proj|v_proj|o_proj"
DENSE = "gate_proj|up_proj|down_proj"


@dataclass(frozen=True)
class Plan:
    """What one step is.

    Attributes:
        sequences, tokens: how many, and of what length; their product is the tokens of a step.
        rank: of the adapters.
        experts: adapt fused experts too.
        checkpointing: compute a layer's activations again in the backward instead of keeping them.
        repeats: timed steps, after two that warm up; the median counts.
    """

    sequences: int = 1
    tokens: int = 4096
    rank: int = 16
    experts: bool = True
    checkpointing: bool = True
    repeats: int = MIN_REPEATS


@dataclass
class ArmResult:
    """One arm: bytes of the model's weights and of the adapters, most memory while training, time of a step.

    Attributes:
        peak_bytes: allocated on a GPU; on a CPU the process's resident memory, code and caches included; None
            where the system does not tell.
        first_loss, last_loss: of the same tokens, so the last is lower.
    """

    name: str
    weight_bytes: int
    adapter_bytes: int
    peak_bytes: int | None
    ms: float
    spread: float
    first_loss: float
    last_loss: float


def measure(
    config: Any,
    plan: Plan,
    device: torch.device,
    policies: Mapping[str, QuantizationPolicy | None],
    show: Callable[[str], object] = lambda text: None,
) -> Iterator[ArmResult]:
    """Train every arm for a few steps; yields each as it is done.

    Args:
        config: a transformers config; weights are random.
        plan: what to measure.
        device: where.
        policies: {arm: what is quantized, or None for bf16}.
        show: told what is going on.

    Raises:
        ValueError: fewer repeats than a median needs.
        ImportError: peft is not installed.
    """
    check_repeats(plan.repeats)
    try:
        import peft  # noqa: F401
    except ImportError:
        raise ImportError("kbit bench train needs peft. Install it: pip install peft.") from None
    for name, policy in policies.items():
        with model_build.freeing(device):
            show(f"{name}: building")
            result = _train(
                name, model_build.build(config, device, torch.bfloat16, policy), plan, device, show
            )
        yield result


def _train(
    name: str,
    built: model_build.Built,
    plan: Plan,
    device: torch.device,
    show: Callable[[str], object],
) -> ArmResult:
    show(f"{name}: training")
    model = adapt(built.model, plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (plan.sequences, plan.tokens), generator=generator).to(device)
    losses, times = [], []
    _reset_peak(device)
    for _ in range(plan.repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        _synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    median, spread = median_and_spread(times[2:])
    adapters = sum(parameter.nbytes for parameter in trained)
    return ArmResult(
        name, built.weight_bytes, adapters, _peak(device), median, spread, float(losses[0]), float(losses[-1])
    )


def adapt(model: Any, plan: Plan) -> Any:
    """The model with adapters on its attention, and on its dense projections or, if planned, its experts."""
    from peft import LoraConfig, get_peft_model

    import kbit.nn

    options: dict[str, Any] = {}
    fused = any(is_experts(module) for module in model.modules())
    quantized = any(isinstance(module, kbit.nn.KbitExperts) for module in model.modules())
    # In a mixture, peft takes gate_proj and its like for parameters of the experts, dense layers left out.
    names = ATTENTION if fused or quantized else f"{ATTENTION}|{DENSE}"
    if fused:
        model.set_experts_implementation("grouped_mm")  # the fastest that 16 bits have
    if plan.experts and quantized:
        names += "|experts"
    if plan.experts and fused:
        options["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]
    options["target_modules"] = _present(model, names)
    settings = LoraConfig(r=plan.rank, lora_alpha=2 * plan.rank, task_type="CAUSAL_LM", **options)
    model = get_peft_model(model, settings)
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _present(model: Any, names: str) -> list[str]:
    """Full names of the modules whose last component is one of `names`."""
    wanted = re.compile(rf"(?:.*\.)?(?:{names})")
    return [name for name, _ in model.named_modules() if wanted.fullmatch(name)]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    machine.reset_gpu_peak(device)
    if device.type == "cuda":
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux counts the peak from now on


def _peak(device: torch.device) -> int | None:
    peak = machine.gpu_peak_bytes(device)
    return machine.peak_resident_bytes() if peak is None else peak


def as_json(results: Sequence[ArmResult]) -> list[dict[str, Any]]:
    """The results as JSON values, with the ratios to bf16 where that was measured."""
    base = next((result for result in results if result.name == BASELINE), None)
    items = []
    for result in results:
        ratios: dict[str, float | None] = {
            "time_vs_bf16": None,
            "weights_vs_bf16": None,
            "peak_vs_bf16": None,
        }
        if base is not None:
            ratios["time_vs_bf16"] = result.ms / base.ms
            ratios["weights_vs_bf16"] = result.weight_bytes / base.weight_bytes
            if result.peak_bytes and base.peak_bytes:
                ratios["peak_vs_bf16"] = result.peak_bytes / base.peak_bytes
        items.append(asdict(result) | ratios)
    return items
