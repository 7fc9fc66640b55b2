"""Whole models, profiles and traffic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.model import captured
from kbit.bench.report import markup, svg
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section
from kbit.bench.report.svg import Axis, Chart, Series

_DASHES = ("", "7 4", "2 4", "9 3 2 3")


# -- whole models --------------------------------------------------------------------------------------------


def _decode(results: Sequence[Result]) -> str:
    parts: list[str] = []
    for result in results:
        if result.kind == "model":
            parts += _arms(result)
            continue
        parts.append(markup.heading(f"{result.device}, {result.name}"))
        items = [{"model": name, **speed} for name, speed in result.data["decode"].items()]
        parts.append(markup.generic(items, "Tokens per second of whole models"))
    return "".join(parts)


def _arms(result: Result) -> Iterator[str]:
    """A result of `kbit bench model`: speed of every arm at every batch size, memory, and profiles."""
    arms, plan = result.data["arms"], result.data["plan"]
    layers = f"{result.data['layers']} layers"
    yield markup.heading(f"{result.data['model']}, {layers}, {result.device}, {result.name}")
    rows = [row for arm in arms for row in arm["decode"]]
    headers = ["arm", "batch", "ms a step", "spread", "tokens/s", "vs bf16", "CUDA graph"]
    caption = f"Decoding after {plan['prompt']} tokens, {plan['steps']} steps a repetition"
    ordered = sorted(rows, key=lambda row: row["batch"])
    yield markup.table(headers, map(_arm_row, ordered), caption)
    sizes = ["weights GB", "peak building GB", "peak running GB"]
    headers = ["arm", *sizes, "prefill tokens/s", "vs bf16", "CUDA graph", "left out"]
    caption = f"Memory, and a prompt of {plan['prefill']} tokens"
    yield markup.table(headers, map(_size_row, arms), caption)
    for row in rows:
        if row["profile"]:
            kinds = [{"purpose": kind, "us": us} for kind, us in row["profile"]["by_kind_us"].items()]
            words = f"{row['arm']}, batch {row['batch']}: kernels of a step"
            caption = (
                "Microseconds by purpose, each kernel in full: where they overlap, sums are more than a step"
            )
            yield markup.details(words, markup.generic(kinds, caption))


def _arm_row(row: Mapping[str, Any]) -> Row:
    speed = [f"{row['ms']:.3f}", f"{100 * row['spread']:.0f}%", f"{row['tokens_s']:.1f}"]
    return Row([row["arm"], str(row["batch"]), *speed, _heat(row["vs_bf16"]), captured(row["reason"])])


def _heat(ratio: float | None) -> markup.Cell:
    return markup.Cell(markup.MISSING) if ratio is None else markup.heat(ratio)


def _size_row(arm: Mapping[str, Any]) -> Row:
    counts = (arm["weight_bytes"] or None, arm["build_peak_bytes"], arm["run_peak_bytes"])
    sizes = [markup.number(None if count is None else count / 1e9, ".2f") for count in counts]
    speed = markup.number(arm["prefill_tokens_s"], ".0f")
    graph = captured(arm.get("prefill_reason")) if arm["prefill_tokens_s"] else ""
    left_out = arm["absent"] or "; ".join(f"{one}: out of memory" for one in arm.get("no_memory", ()))
    return Row([arm["name"], *sizes, speed, _heat(arm.get("prefill_vs_bf16")), graph, left_out])


def _profiles(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        for about in result.data["profiles"]:
            what = [about["model"], about["arm"], f"batch {about['batch']}", result.device, result.name]
            parts += [markup.heading(", ".join(filter(None, what))), *_profile(about)]
    return "".join(parts)


def _profile(about: Mapping[str, Any]) -> Iterator[str]:
    busy = f"{about['device'].upper()} busy"
    figures = [(f"{about['step_us']:.0f} µs", "one decode step"), (f"{100 * about['busy']:.1f}%", busy)]
    yield markup.tiles(figures)
    headers = ["kernel", "purpose", "calls", "us", "% of step", "step without it, us", "at most"]
    yield markup.table(headers, map(_profile_row, about["groups"]), "Levers", left=2)
    kernels = markup.table(headers, map(_profile_row, about["kernels"]), "One decode step", left=2)
    yield markup.details(f"{len(about['kernels'])} kernels", kernels)


def _profile_row(item: Mapping[str, Any]) -> Row:
    without = [f"{item['us']:.1f}", f"{100 * item['share']:.1f}", f"{item['step_without_us']:.1f}"]
    ceiling = f"{markup.number(item['ceiling'], '.2f')}x"
    return Row([item["kernel"], item["group"], f"{item['calls']:g}", *without, ceiling])


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
        "decode",
        "Whole models",
        "Tokens per second in one loop, the same for every model.",
        ("decode", "model"),
        "kbit bench model qwen3-30b-a3b --json {folder}/model.json",
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
