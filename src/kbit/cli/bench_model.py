"""`kbit bench model`: whole models of published sizes and random weights, quantized and in bf16."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.model_arms import ArmBits, FirstLayers, ModelName, OneDevice, check_device, quantized_arms
from kbit.cli.options import names, numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kbit.bench.model import ArmResult

console = Console()
_KERNELS_SHOWN = 15


def _gigabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e9:.1f}"


def _sizes(results: Sequence[ArmResult]) -> Table:
    from kbit.bench.model import captured, label, prefill_vs_bf16

    sizes = ("weights GB", "peak building", "peak running")
    headers = ("arm", *sizes, "prefill tok/s", "vs bf16", "CUDA graph")
    table = text_table("memory and prefill", headers, left=("arm", "CUDA graph"))
    for result in results:
        if result.absent:
            table.add_row(label(result.name, result.gpus), escape(f"left out: {result.absent}"))
            continue
        speed = result.prefill_tokens_s
        peaks = (_gigabytes(result.build_peak_bytes), _gigabytes(result.run_peak_bytes))
        prefill = ("", "", "")
        if speed is not None:
            ratio = _ratio(prefill_vs_bf16(result, results))
            prefill = (f"{speed:.0f}", ratio, escape(captured(result.prefill_reason)))
        name = label(result.name, result.gpus)
        table.add_row(name, f"{result.weight_bytes / 1e9:.2f}", *peaks, *prefill)
    return table


def _decode(results: Sequence[ArmResult]) -> Table:
    from kbit.bench.model import captured, label, vs_bf16, vs_one_gpu

    headers = ("batch", "arm", "ms/step", "spread", "tok/s", "vs bf16", "vs one GPU", "CUDA graph")
    table = text_table("decode", headers, left=("arm", "CUDA graph"))
    rows = sorted((row for result in results for row in result.decode), key=lambda row: row.batch)
    for row in rows:
        ratios = (_ratio(vs_bf16(row, results)), _ratio(vs_one_gpu(row, results)))
        speed = (f"{row.ms:.3f}", f"{100 * row.spread:.0f}%", f"{row.tokens_s:.1f}")
        table.add_row(str(row.batch), label(row.arm, row.gpus), *speed, *ratios, escape(captured(row.reason)))
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _profile(arm: str, batch: int, profile: dict[str, Any]) -> Table:
    title = f"{arm}, batch {batch}: kernels of a step, each in full; where they overlap, sums are more"
    table = text_table(title, ("kernel", "us", "calls"), left=("kernel",), overflow="fold")
    for kind, us in profile["by_kind_us"].items():
        table.add_row(kind, f"{us:.1f}", "")
    table.add_section()
    for kernel in profile["kernels"][:_KERNELS_SHOWN]:
        table.add_row(escape(kernel["name"][:100]), f"{kernel['us']:.1f}", f"{kernel['calls']:.1f}")
    return table


def model(
    name: ModelName,
    bits: ArmBits = "4",
    embedding_bits: Annotated[
        int | None, typer.Option(help="Width of embeddings and head too; 16 bits by default.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search block scales; random weights need not.")
    ] = False,
    baseline: Annotated[bool, typer.Option(help="Measure bf16 too, where it fits.")] = True,
    batch: Annotated[str, typer.Option(help="Sequences decoded at once.")] = "1,4,32",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens before decoding.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Tokens decoded per repetition.")] = 64,
    prefill: Annotated[int, typer.Option(min=0, help="Tokens of the timed prompt; 0: none.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 7,
    layers: FirstLayers = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile every layer, all arms.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="List the kernels of a step.")] = False,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs over which the model is split.")] = "1",
    by_expert: Annotated[
        bool, typer.Option("--by-expert", help="On several GPUs: split experts by id, not each expert.")
    ] = False,
    all_reduce: Annotated[
        str | None,
        typer.Option(help="How several GPUs add up: nccl, one-shot, or both; as loading has it by default."),
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that several GPUs may take.")] = 600,
    device: OneDevice = "cuda",
    json_file: JsonFile = None,
) -> None:
    """Decode and prefill of a whole model against bf16. Random weights, quantized layer by layer."""
    import torch

    from kbit.bench import gpu_timing, model_build, model_ranks
    from kbit.bench import model as bench
    from kbit.integrations.transformers.collectives import ALL_REDUCES
    from kbit.integrations.transformers.compiled_layers import overlap_kernels

    if compiled:
        overlap_kernels()
    check_device("kbit bench model", device)
    counts = numbers("--gpus", gpus)
    sums = names("--all-reduce", all_reduce, ALL_REDUCES) if all_reduce else [None]
    model_ranks.check(device, max(counts))
    plan = bench.Plan(numbers("--batch", batch), prompt, steps, prefill, repeats, compiled, profile)
    policies = quantized_arms(bits, embedding_bits=embedding_bits, search=search)
    policies |= {bench.BASELINE: None} if baseline else {}
    config = model_build.load_config(name, layers)
    settings = vars(plan) | {"dtype": "bfloat16", "embedding_bits": embedding_bits, "by_expert": by_expert}
    settings |= {"linear_attention": _linear_attention(config, compiled)}
    found = {"machine": gpu_timing.describe(device), "model": name, "layers": config.num_hidden_layers}
    results: list[ArmResult] = []

    def arms(progress: Callable[[str], None]) -> Iterator[ArmResult]:
        if 1 in counts:
            yield from bench.measure(config, plan, torch.device(device), policies, progress)
        for ranks, sum_by in ((count, way) for count in counts if count > 1 for way in sums):
            progress(f"{name} on {ranks} GPUs" + (f", {sum_by}" if sum_by else ""))
            # In 16 bits transformers' own layers add up, the same way each time.
            these = {arm: policy for arm, policy in policies.items() if policy or sum_by == sums[0]}
            job = model_ranks.Job(name, layers, plan, these, device, by_expert, sum_by, timeout)
            yield from model_ranks.measure(job, ranks)

    try:
        with console.status(name) as status:
            for arm in arms(status.update):
                results.append(arm)  # written at once: an interruption loses one arm
                write_json(json_file, found | {"plan": settings, "arms": bench.as_json(results)})
    finally:
        if results:
            _show(results)


def _linear_attention(config: Any, compiled: bool) -> str | None:
    """What runs linear attention, for a model that has it: kbit, a library of a version, or PyTorch."""
    if "linear_attention" not in (getattr(config, "layer_types", None) or ()):
        return None
    from kbit.integrations.transformers.linear_attention import by_own_kernels

    if not compiled and by_own_kernels(config):
        return "kbit"
    name = "flash-linear-attention"
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return "PyTorch"


def _show(results: Sequence[ArmResult]) -> None:
    for table in (_sizes(results), _decode(results)):
        show(table)
    for what in (what for result in results for what in result.no_memory):
        console.print(f"{escape(what)}: left out, the GPU's memory is too small for it")
    for row in (row for result in results for row in result.decode if row.profile):
        show(_profile(row.arm, row.batch, row.profile or {}))
