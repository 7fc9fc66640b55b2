"""Experts: grouped products and whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.kernel_rows import BASELINE, DISPATCHED, OURS
from kbit.bench.report import markup
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section


def _experts(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        if result.kind == "moe":
            parts.append(markup.heading(f"{result.device}, {result.data['dtype']}, {result.name}"))
            parts += _problems(result.data["rows"], float(result.data["read_bandwidth_gb_s"]))
        items = result.data.get("grouped") or []
        for dtype in dict.fromkeys(item["dtype"] for item in items):
            here = [item for item in items if item["dtype"] == dtype]
            parts.append(markup.heading(f"{result.device}, {dtype}, {result.name}"))
            parts.append(_grouped_table(here, dtype))
    return "".join(parts)


# -- results of `kbit bench moe` -----------------------------------------------------------------------------


def _problems(items: Sequence[Mapping[str, Any]], bandwidth: float) -> Iterator[str]:
    """A table per problem: a number of experts of one shape, or a layer under one routing."""
    headers = ["kernel", "k", "us", "spread", "GB/s", "% of read", "vs best 16-bit"]
    for problem in dict.fromkeys(item["problem"] for item in items):
        unit = "tokens" if problem.startswith("layer") else "tokens each"
        here = [item for item in items if item["problem"] == problem]
        yield markup.table([unit, *headers], _measured(here, bandwidth), problem, left=2)


def _measured(items: Sequence[Mapping[str, Any]], bandwidth: float) -> Iterator[Row]:
    previous = items[0]["rows"]
    for item in items:
        first, previous = item["rows"] != previous, item["rows"]
        ratio = item["vs_best_16_bit"]
        plain = item["kind"] == BASELINE or ratio is None
        yield Row(
            [
                str(item["rows"]),
                item["kernel"],
                str(item["bits"] or markup.MISSING),
                *markup.speed(item, bandwidth),
                markup.number(ratio, ".2f") if plain else markup.heat(ratio),
            ],
            first=first,
        )


# -- grouped rows in a kernel table --------------------------------------------------------------------------


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


SECTIONS = (
    Section(
        "moe",
        "Experts",
        "All experts of a layer in one launch, and the whole layer around them, beside the faster of the "
        "16-bit ways.",
        ("moe", "kernels"),
        "kbit bench moe --json {folder}/moe.json",
        _experts,
    ),
)
