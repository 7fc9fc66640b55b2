"""CPU kernels, checks, whatever no section knows, and where every figure comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.report import markup
from kbit.bench.report.markup import Row
from kbit.bench.report.results import OTHER, Result
from kbit.bench.report.sections import Section


def _cpu(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        bandwidth = result.data["read_bandwidth_gb_s"]
        parts.append(markup.heading(f"{result.device}, {bandwidth:.1f} GB/s read, {result.name}"))
        linear = result.data["linear"]
        for index, shape in enumerate(dict.fromkeys(row["shape"] for row in linear)):
            rows = [row for row in linear if row["shape"] == shape]
            size = f"{shape}: {rows[0]['in_features']} → {rows[0]['out_features']}"
            parts.append(markup.details(size, _cpu_table(rows, size), opened=not index))
        if speeds := result.data["quantize"]:
            parts.append(markup.details("quantizing", markup.generic(speeds, "Million weights a second")))
    return "".join(parts)


def _cpu_table(rows: Sequence[Mapping[str, Any]], size: str) -> str:
    counts = sorted({row["rows"] for row in rows})
    found = {(row["kernel"], row["bits"], row["rows"]): row for row in rows}
    body = []
    for kernel, bits in dict.fromkeys((row["kernel"], row["bits"]) for row in rows):
        cells: list[str | markup.Cell] = [kernel, str(bits or markup.MISSING)]
        for count in counts:
            row = found.get((kernel, bits, count))
            cells.append(markup.MISSING if row is None else f"{row['ms']:.3f}")
            cells.append(markup.MISSING if row is None else markup.heat(row["vs_bfloat16"]))
        body.append(Row(cells))
    headers = ["kernel", "k"]
    for count in counts:
        headers += [f"M={count}, ms", "vs bf16"]
    return markup.table(headers, body, f"{size}, bfloat16 activations")


def _checks(results: Sequence[Result]) -> str:
    rows = [
        Row(
            [
                run["tool"],
                "passed" if run["exit_code"] == 0 else "FAILED",
                "; ".join(run["summary"]),
                result.name,
            ]
        )
        for result in results
        for run in result.data["runs"]
    ]
    return markup.table(["tool", "result", "summary", "file"], rows, "compute-sanitizer", left=4)


def _others(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        parts.append(markup.heading(f"{result.name}, {result.device}"))
        tables = [
            markup.generic(value, key.replace("_", " "))
            for key, value in result.data.items()
            if isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        ]
        parts.append("".join(tables) or markup.paragraph("No table in this file."))
    return "".join(parts)


_PROVENANCE = {
    "date": "date",
    "commit": "commit",
    "gpu": "GPU",
    "driver": "driver",
    "cuda": "CUDA",
    "torch": "torch",
    "python": "Python",
    "kbit": "kbit",
    "cpu": "CPU",
    "cores": "cores",
    "threads": "threads",
    "isa": "CPU kernels",
    "l2_mb": "L2, MB",
}


def _provenance(results: Sequence[Result]) -> str:
    headers = ["file", "content", *_PROVENANCE.values(), "bandwidth, GB/s", "timing", "SHA-256"]
    return markup.table(headers, map(_origin, results), "Every result file", left=4) + "".join(
        _warnings(results)
    )


def _origin(result: Result) -> Row:
    data = result.data
    values = [_text(result.machine.get(key)) for key in _PROVENANCE]
    bandwidth = markup.number(data.get("read_bandwidth_gb_s"), ".1f")
    timing = f"{data['timer']}, median of {data['repeats']}" if "timer" in data and "repeats" in data else ""
    return Row([result.name, result.kind, *values, bandwidth, timing or markup.MISSING, result.sha256[:16]])


def _text(value: object) -> str:
    return markup.MISSING if value is None else str(value)


def _warnings(results: Sequence[Result]) -> Iterator[str]:
    """What makes figures hard to compare or to repeat."""
    commits = {str(result.machine.get("commit")) for result in results if result.machine.get("gpu")}
    if len(commits) > 1:
        names = ", ".join(sorted(commits))
        yield markup.paragraph(f"GPU results are of {len(commits)} commits: {names}.", "note")
    for result in results:
        if "+changes" in str(result.machine.get("commit")):
            yield markup.paragraph(f"{result.name} was measured with uncommitted changes.", "note")
        for peer, reasons in (result.data.get("peers_absent") or {}).items():
            yield markup.paragraph(f"{result.name}: no {peer}: {'; '.join(reasons)}.", "note")


SECTIONS = (
    Section(
        "cpu",
        "CPU kernels",
        "Milliseconds, and times as fast as torch's bfloat16 in the same run, weights colder than the cache.",
        ("cpu",),
        "kbit bench cpu --json {folder}/cpu.json",
        _cpu,
    ),
    Section(
        "checks",
        "Checks",
        "Kernels under compute-sanitizer: memory, races, uninitialised reads.",
        ("sanitizer",),
        "python tools/sanitize.py --help",
        _checks,
    ),
)
# Shown only where there is something.
OTHERS = Section("other", "Other results", "Files of no kind above.", (OTHER,), "", _others)
PROVENANCE = Section(
    "provenance",
    "Environment and provenance",
    "What each figure was measured on, from which commit, in which file.",
    (),
    "",
    _provenance,
)
