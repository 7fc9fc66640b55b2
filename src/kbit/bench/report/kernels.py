"""Kernel tables per M, speed-up against M, roofline, and dequantizing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench import dequant, plots
from kbit.bench.kernel_rows import (
    ALL_ROWS,
    BASELINE,
    COMMAND,
    Comparison,
    KernelRow,
    compare,
    from_json,
    totals,
)
from kbit.bench.report import markup, svg
from kbit.bench.report.markup import Cell, Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section
from kbit.bench.report.svg import Axis, Chart, Series

TABLES_COMMAND = f"{COMMAND} {ALL_ROWS} --dtype fp16,bf16 --json {{folder}}/kernels.json"


def rows_of(result: Result) -> list[KernelRow]:
    """The measurements of a kernels file."""
    return from_json(result.data["rows"])


def _dtypes(rows: Sequence[KernelRow]) -> list[str]:
    return list(dict.fromkeys(row.dtype for row in rows))


def _source(result: Result, *more: str) -> str:
    return markup.heading(", ".join((result.device, *more, result.name)))


# -- tables --------------------------------------------------------------------------------------------------


def _tables(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        comparisons = compare(rows_of(result))
        for dtype in dict.fromkeys(item.baseline.dtype for item in comparisons):
            here = [item for item in comparisons if item.baseline.dtype == dtype]
            parts.append(_source(result, dtype))
            for index, count in enumerate(sorted({item.baseline.rows for item in here})):
                chosen = [item for item in here if item.baseline.rows == count]
                bandwidth = float(result.data["read_bandwidth_gb_s"])
                words = f"M = {count}: {len(chosen)} layers and widths"
                table = _table(chosen, bandwidth, f"Microseconds at M = {count}, {dtype}")
                parts.append(markup.details(words, table, opened=not index and result is results[0]))
    return "".join(parts)


def _table(comparisons: Sequence[Comparison], bandwidth: float, caption: str) -> str:
    dtype = comparisons[0].baseline.dtype
    names = list(dict.fromkeys(itertools.chain.from_iterable(item.kernels for item in comparisons)))
    headers = [
        "layer",
        "K → N",
        "k",
        *names,
        dtype,
        "fastest of ours",
        f"kbit vs {dtype}",
        "GB/s",
        "% of read",
    ]
    return markup.table(headers, _rows(comparisons, names, bandwidth), caption, left=2)


def _rows(comparisons: Sequence[Comparison], names: Sequence[str], bandwidth: float) -> Iterator[Row]:
    shape = comparisons[0].baseline.shape
    for item in comparisons:
        base, best = item.baseline, item.best
        first, shape = base.shape != shape, base.shape
        yield Row(
            [
                base.shape,
                f"{base.in_features} → {base.out_features}",
                str(item.bits),
                *(
                    f"{item.kernels[name].us:.1f}" if name in item.kernels else markup.MISSING
                    for name in names
                ),
                f"{base.us:.1f}",
                best.kernel,
                markup.heat(item.speedup(item.dispatched)),
                f"{item.dispatched.gb_s:.0f}",
                f"{100 * item.dispatched.gb_s / bandwidth:.0f}",
            ],
            first=first,
        )
    blanks = [""] * (len(names) - 1)
    for index, total in enumerate(totals(comparisons, dispatched=True)):
        cells = [
            "block",
            total.model,
            str(total.bits),
            f"{total.us:.1f}",
            *blanks,
            f"{total.baseline_us:.1f}",
        ]
        yield Row([*cells, "", markup.heat(total.speedup), "", ""], total=True, first=not index)


# -- speed-up against M --------------------------------------------------------------------------------------


def _speedups(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        rows = rows_of(result)
        for dtype in _dtypes(rows):
            charts = [_speedup_chart(rows, model, dtype) for model in _models(rows, dtype)]
            parts.append(_source(result, dtype))
            parts.append('<div class="charts">' + "".join(charts) + "</div>")
            parts += _speedup_tables(rows, dtype)
    return "".join(parts)


def _models(rows: Sequence[KernelRow], dtype: str) -> list[str]:
    """Models with a comparison at several M."""
    counts: dict[str, set[int]] = {}
    for item in compare([row for row in rows if row.dtype == dtype]):
        counts.setdefault(item.baseline.model, set()).add(item.baseline.rows)
    return [model for model, numbers in counts.items() if len(numbers) > 1]


def _speedup_chart(rows: Sequence[KernelRow], model: str, dtype: str) -> str:
    lines = plots.speedups(rows, model, dtype)
    counts = sorted({count for line in lines.values() for count in line})
    layers = dict.fromkeys(row.shape for row in rows if row.model == model and row.dtype == dtype)
    return svg.draw(
        Chart(
            f"{model}: {', '.join(layers)}",
            Axis("tokens M", log=True, ticks=counts),
            Axis(f"times as fast as {dtype} cuBLAS", low=0.0),
            [
                Series(f"k={bits}", list(line.items()), f"k{bits}", bits)
                for bits, line in sorted(lines.items())
            ],
            levels=[(1.0, f"{dtype} cuBLAS")],
        )
    )


def _speedup_tables(rows: Sequence[KernelRow], dtype: str) -> Iterator[str]:
    comparisons = compare([row for row in rows if row.dtype == dtype])
    counts = sorted({item.baseline.rows for item in comparisons})
    for bits in sorted({item.bits for item in comparisons}):
        here = [item for item in comparisons if item.bits == bits]
        found = {(item.baseline.shape, item.baseline.rows): item.speedup(item.dispatched) for item in here}
        body = []
        for shape, base in {item.baseline.shape: item.baseline for item in here}.items():
            ratios = [found.get((shape, count)) for count in counts]
            cells = [Cell(markup.MISSING) if ratio is None else markup.heat(ratio) for ratio in ratios]
            body.append(Row([f"{shape} ({base.in_features} → {base.out_features})", *cells]))
        caption = f"k={bits}: times as fast as {dtype} cuBLAS, as dispatched"
        yield markup.table(["layer", *(f"M={count}" for count in counts)], body, caption)


# -- roofline ------------------------------------------------------------------------------------------------


def _rooflines(results: Sequence[Result]) -> str:
    """One per device and dtype, of all its files: a file of small M has no flat roof of its own."""
    groups: dict[tuple[str, str], list[KernelRow]] = {}
    bandwidths: dict[str, float] = {}
    for result in results:
        for row in rows_of(result):
            groups.setdefault((result.device, row.dtype), []).append(row)
        fastest = max(bandwidths.get(result.device, 0.0), float(result.data["read_bandwidth_gb_s"]))
        bandwidths[result.device] = fastest
    parts = [
        _roofline(rows, dtype, bandwidths[device], device)
        for (device, dtype), rows in groups.items()
        if any(row.kind == BASELINE for row in rows)
    ]
    return '<div class="charts">' + "".join(parts) + "</div>" if parts else ""


def _roofline(rows: Sequence[KernelRow], dtype: str, bandwidth: float, device: str) -> str:
    roofs = plots.roofline(rows, bandwidth)
    series = [Series("measured roofs", roofs, "roof", mark=False)]
    for bits, points in plots.under_roofs(rows).items():
        name, style, shape = (f"kbit, k={bits}", f"k{bits}", bits) if bits else (f"{dtype} cuBLAS", "base", 1)
        series.append(Series(name, points, style, shape, line=False))
    title = f"{device}, {dtype}: {bandwidth:.0f} GB/s read, at most {roofs[-1][1]:.0f} TFLOP/s"
    axes = Axis("operations per byte of weights", log=True), Axis("TFLOP/s", log=True)
    return svg.draw(Chart(title, *axes, series))


# -- dequantizing --------------------------------------------------------------------------------------------


def _dequantize(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        names = list(dequant.DequantizeRow.__dataclass_fields__)
        items = result.data.get("rows") or []
        rows = [dequant.DequantizeRow(**{name: item[name] for name in names}) for item in items]
        bandwidth = float(result.data["read_bandwidth_gb_s"])
        for dtype in dict.fromkeys(row.dtype for row in rows):
            here = [row for row in rows if row.dtype == dtype]
            headers = ["layer", "k", "M", dtype, "dequantize", "total", f"vs {dtype}", "GB/s", "% of read"]
            body = [_dequantize_row(row, bandwidth) for row in here]
            parts += [_source(result, dtype), markup.table(headers, body, "Microseconds")]
        if alone := result.data.get("row_kernels"):
            headers = ["kernel", "layer", "k", "dtype", "us", "spread", "GB/s", "% of read"]
            body = [_alone_row(item, bandwidth) for item in alone]
            parts += [_source(result), markup.table(headers, body, "Kernels alone", left=2)]
    return "".join(parts)


def _alone_row(item: Mapping[str, Any], bandwidth: float) -> Row:
    layer = f"{item['in_features']} → {item['out_features']}"
    known = [item["kernel"], layer, str(item["bits"]), item["dtype"]]
    return Row([*known, *markup.speed(item, bandwidth)])


def _dequantize_row(row: dequant.DequantizeRow, bandwidth: float) -> Row:
    times = [f"{us:.1f}" for us in (row.fp16_us, row.dequantize_us, row.total_us)]
    share = f"{100 * row.gb_s / bandwidth:.0f}"
    return Row(
        [row.shape, str(row.bits), str(row.rows), *times, markup.heat(row.ratio), f"{row.gb_s:.0f}", share]
    )


SECTIONS = (
    Section(
        "kernels",
        "Kernels, per number of tokens",
        "Every kernel beside 16-bit cuBLAS of the same run: weights colder than the cache, CUDA-graph "
        "replays, medians, in microseconds. `kbit` is what kbit.linear chooses by itself, and what the "
        "ratio, GB/s (packed bytes over time) and their share of the measured read bandwidth are of. Block "
        "rows add a model's layers up, each as often as it runs.",
        ("kernels",),
        TABLES_COMMAND,
        _tables,
    ),
    Section(
        "speedup",
        "Speed-up against the number of tokens",
        "Above 1, kbit is faster than cuBLAS on 16-bit weights. Charts add a model's layers up, each as "
        "often as it runs in a block.",
        ("kernels",),
        TABLES_COMMAND,
        _speedups,
    ),
    Section(
        "roofline",
        "Roofline",
        "The slanted roof is the measured read bandwidth, the flat one the fastest cuBLAS row. A layer in k "
        "bits lies further right than in 16, since it reads fewer bytes for the same arithmetic.",
        ("kernels",),
        TABLES_COMMAND,
        _rooflines,
    ),
    Section(
        "dequantize",
        "Decoding in front of cuBLAS",
        "The fallback for large M: what decoding adds to cuBLAS.",
        ("dequantize",),
        "kbit bench dequant --json {folder}/dequant.json",
        _dequantize,
    ),
)
