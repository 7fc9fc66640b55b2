"""What commands share that measure models of published sizes and random weights, quantized and in 16 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbit.cli.options import one_of, widths

if TYPE_CHECKING:
    from kbit.format.policy import QuantizationPolicy

ModelName = Annotated[str, typer.Argument(help="A shipped model, such as qwen3-30b-a3b, or a config.json.")]
ArmBits = Annotated[str, typer.Option(help="Bits per weight; one measurement each.")]
FirstLayers = Annotated[int | None, typer.Option(min=1, help="Only the first layers.")]
OneDevice = Annotated[str, typer.Option(help="Where to run: cuda or cpu.")]


def quantized_arms(bits: str, **options: Any) -> dict[str, QuantizationPolicy | None]:
    """{arm: policy} of the widths that --bits names; options are a policy's."""
    from kbit.format.policy import QuantizationPolicy

    return {f"kbit k={width}": QuantizationPolicy(bits=width, **options) for width in widths(bits)}


def all_arms(bits: str, baseline: bool) -> dict[str, QuantizationPolicy | None]:
    """Those of the widths, and 16 bits if asked for. With plain scales: random weights need no search."""
    from kbit.bench.model import BASELINE

    return quantized_arms(bits, search=False) | ({BASELINE: None} if baseline else {})


def check_device(command: str, device: str) -> None:
    """Raises ValueError for another --device than cuda and cpu, RuntimeError for cuda without a GPU."""
    from kbit.bench import gpu_timing

    one_of("--device", device, ("cuda", "cpu"))
    if device == "cuda":
        gpu_timing.require_gpu(command, or_cpu=True)
