"""Experts, whole models, profiles and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.kernel_rows import DISPATCHED, OURS
from kbit.bench.report import markup, svg
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section
from kbit.bench.report.svg import Axis, Chart, Series

_DASHES = ("", "7 4", "2 4", "9 3 2 3")


# -- experts -------------------------------------------------------------------------------------------------


def _experts(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        items = result.data.get("grouped") or []
        for dtype in dict.fromkeys(item["dtype"] for item in items):
            here = [item for item in items if item["dtype"] == dtype]
            parts.append(markup.heading(f"{result.device}, {dtype}, {result.name}"))
            parts.append(_grouped_table(here, dtype))
        if layers := result.data.get("moe"):
            parts.append(markup.heading(f"{result.device}, whole layers, {result.name}"))
            parts.append(markup.generic(layers, "MoE layers"))
    return "".join(parts)


def _grouped_table(items: Sequence[Mapping[str, Any]], dtype: str) -> str:
    """A row per shape, experts, tokens and width; the ratio is to the faster of the 16-bit kernels."""
    times: dict[tuple[str, int, float], dict[int | None, dict[str, float]]] = {}
    ours: set[str] = set()
    for item in items:
        place = item["shape"], item["experts"], item["tokens_per_expert"]
        times.setdefault(place, {}).setdefault(item["bits"], {})[item["kernel"]] = item["us"]
        if item["bits"] is not None and item.get("kind", OURS) == OURS:
            ours.add(item["kernel"])
    kernels = list(dict.fromkeys(item["kernel"] for item in items))
    headers = ["layer", "experts", "tokens each", "k", *kernels, f"kbit vs {dtype}"]
    return markup.table(headers, _grouped_rows(times, kernels, ours), "Grouped products, microseconds")


def _grouped_rows(
    times: Mapping[tuple[str, int, float], Mapping[int | None, Mapping[str, float]]],
    kernels: Sequence[str],
    ours: set[str],
) -> Iterator[Row]:
    for (shape, experts, each), by_bits in times.items():
        dense = by_bits.get(None, {})
        for index, bits in enumerate(sorted(width for width in by_bits if width is not None)):
            here = dict(by_bits[bits])
            mine = [us for kernel, us in here.items() if kernel in ours]
            chosen = here.get(DISPATCHED, min(mine, default=None))
            ratio = markup.heat(min(dense.values()) / chosen) if dense and chosen else markup.MISSING
            us = [markup.number({**dense, **here}.get(kernel), ".1f") for kernel in kernels]
            yield Row([shape, str(experts), f"{each:g}", str(bits), *us, ratio], first=not index)


# -- whole models --------------------------------------------------------------------------------------------


def _decode(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        parts.append(markup.heading(f"{result.device}, {result.name}"))
        if isinstance(speeds := result.data.get("decode"), dict):
            items = [{"model": name, **speed} for name, speed in speeds.items()]
        else:
            items = result.data.get("models") or result.data.get("decode") or []
        parts.append(markup.generic(items, "Tokens per second of whole models"))
    return "".join(parts)


def _profiles(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        about = result.data["profile"]
        parts.append(markup.heading(f"{about['model']}, {result.device}, {result.name}"))
        busy = f"{about['device'].upper()} busy"
        figures = [(f"{about['step_us']:.0f} µs", "one decode step"), (f"{100 * about['busy']:.1f}%", busy)]
        parts.append(markup.tiles(figures))
        headers = ["kernel", "group", "calls", "us", "% of step", "step without it, us", "at most"]
        parts.append(markup.table(headers, map(_profile_row, about["kernels"]), "One decode step", left=2))
    return "".join(parts)


def _profile_row(item: Mapping[str, Any]) -> Row:
    without = [f"{item['us']:.1f}", f"{100 * item['share']:.1f}", f"{item['step_without_us']:.1f}"]
    return Row([item["kernel"], item["group"], f"{item['calls']:g}", *without, f"{item['ceiling']:.2f}x"])


# -- traffic -------------------------------------------------------------------------------------------------


def _workload(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        data = result.data
        traffic, limits = data["traffic"], data["scheduler"]
        parts.append(markup.heading(f"{result.device}, {result.name}"))
        parts.append(
            markup.paragraph(
                f"{traffic['about']} On average {traffic['mean_prompt_tokens']:.0f} prompt and "
                f"{traffic['mean_answer_tokens']:.0f} answer tokens; chunks of {limits['chunk']} tokens, at "
                f"most {limits['budget']} an iteration, {limits['turns']} turns, seed {limits['seed']}. "
                f"{data['interpolation']}"
            )
        )
        charts = [_users_chart(data["workload"], bits, data["earlier"]) for bits in _widths(data["workload"])]
        parts.append('<div class="charts">' + "".join(charts) + "</div>")
        for model in data["workload"]:
            parts.append(_scenario_table(model))
            parts += [markup.paragraph(note, "note") for note in model["notes"]]
    return "".join(parts)


def _widths(models: Sequence[Mapping[str, Any]]) -> list[int]:
    return sorted({item["bits"] for model in models for item in model["scenarios"]})


def _users_chart(models: Sequence[Mapping[str, Any]], bits: int, earlier: Mapping[str, Any]) -> str:
    users = sorted({item["users"] for model in models for item in model["scenarios"]})
    dtype = models[0]["scenarios"][0]["dtype"]
    series = []
    for index, model in enumerate(models):
        here = [item for item in model["scenarios"] if item["bits"] == bits]
        points = [(item["users"], item["speedup"]) for item in here]
        series.append(Series(model["model"], points, f"k{bits}", index, dash=_DASHES[index % len(_DASHES)]))
    crossover = earlier["slower_than_fp16_from_users"]
    shown = crossover <= users[-1]
    text = f"earlier kernels: slower than\n{dtype} from {crossover} users on ({earlier['gpu']})"
    return svg.draw(
        Chart(
            f"k={bits} under continuous batching",
            Axis("users served at once", log=True, ticks=users),
            Axis(f"times as fast as {dtype} cuBLAS", low=0.0),
            [one for one in series if one.points],
            levels=[(1.0, "")],
            marks=[(crossover, text)] if shown else [],
            shade=(crossover, users[-1], 0.0, 1.0) if shown and crossover < users[-1] else None,
        )
    )


def _scenario_table(model: Mapping[str, Any]) -> str:
    items = model["scenarios"]
    kernels = list(dict.fromkeys(kernel for item in items for kernel in item["shares"]))
    dtype = items[0]["dtype"]
    rows, users = [], items[0]["users"]
    for item in items:
        first, users = item["users"] != users, item["users"]
        shares = [item["shares"].get(kernel) for kernel in kernels]
        rows.append(
            Row(
                [
                    str(item["users"]),
                    str(item["bits"]),
                    f"{item['mean_tokens']:.1f}",
                    f"{100 * item['decode_only']:.0f}%",
                    *(markup.MISSING if share is None else f"{100 * share:.0f}%" for share in shares),
                    f"{item['baseline_us']:.1f}",
                    f"{item['us']:.1f}",
                    markup.heat(item["speedup"]),
                ],
                first=first,
            )
        )
    headers = ["users", "k", "mean M", "decode only", *kernels, f"{dtype} us", "kbit us", f"vs {dtype}"]
    caption = f"{model['model']}: share of time per kernel, and time of a block's layers in an iteration"
    return markup.table(headers, rows, caption)


SECTIONS = (
    Section(
        "moe",
        "Experts",
        "All experts of a layer in one launch, beside the faster of the 16-bit ways.",
        ("kernels", "moe"),
        "kbit bench kernels --model qwen3-coder-next --json {folder}/kernels.json",
        _experts,
    ),
    Section(
        "decode",
        "Whole models",
        "Tokens per second in one greedy loop, the same for every model.",
        ("decode", "models"),
        "kbit bench decode MODEL MODEL-4bit --json {folder}/decode.json",
        _decode,
    ),
    Section(
        "profile",
        "Where a decode step goes",
        "Time per kernel, the share of the step in which the device is busy, and how many times as fast the "
        "step would be without the kernel at all: no work on it can gain more.",
        ("profile",),
        "kbit profile MODEL-4bit --json {folder}/profile.json",
        _profiles,
    ),
    Section(
        "workload",
        "Traffic",
        "Kernel times weighed by how often each number of tokens happens, for one user and under continuous "
        "batching. The kernels before these were slower than 16 bits from the marked number of users on; the "
        "shaded region is where no curve should be.",
        ("workload",),
        "kbit bench workload {folder}/kernels.json --json {folder}/workload.json",
        _workload,
    ),
)
