"""Experts: grouped products, whole layers and routers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.kernel_rows import BASELINE, COUNTED_IN_TOKENS
from kbit.bench.report import markup
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section


def _experts(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        parts.append(markup.heading(f"{result.device}, {result.data['dtype']}, {result.name}"))
        parts += _problems(result.data["rows"], float(result.data["read_bandwidth_gb_s"]))
    return "".join(parts)


def _problems(items: Sequence[Mapping[str, Any]], bandwidth: float) -> Iterator[str]:
    """A table per problem: a number of experts of one shape, a layer under one routing, or a router."""
    headers = ["kernel", "k", "us", "spread", "GB/s", "% of read", "vs best 16-bit"]
    for problem in dict.fromkeys(item["problem"] for item in items):
        unit = "tokens" if problem.startswith(COUNTED_IN_TOKENS) else "tokens each"
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


SECTIONS = (
    Section(
        "moe",
        "Experts",
        "All experts of a layer in one launch, the whole layer around them, and the router before it, beside "
        "the faster of the 16-bit ways.",
        ("moe",),
        "kbit bench moe --json {folder}/moe.json",
        _experts,
    ),
)
