"""What quantizing costs, and the demo's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kbit.bench.report import markup, svg
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section
from kbit.bench.report.svg import Axis, Chart, Series

_STYLES = ("k4", "k3", "k2", "k5")


def _quality(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        rows = result.data["rows"]
        tokens = f"{rows[0]['tokens']} tokens in windows of {result.data['window']}"
        parts.append(markup.heading(f"{result.data['model']}, {tokens}, {result.name}"))
        charts = [
            _chart(rows, "perplexity", "perplexity", False),
            _chart(rows, "kl_divergence", "KL divergence, nats", True),
        ]
        parts.append('<div class="charts">' + "".join(charts) + "</div>")
        headers = ["model", "method", "bits per weight", "error (nmse)", "perplexity", "KL divergence"]
        parts.append(markup.table(headers, map(_row, rows), "Perplexity and KL divergence", left=2))
    return "".join(parts)


def _chart(rows: Sequence[Mapping[str, Any]], key: str, label: str, log: bool) -> str:
    measured = [row for row in rows if row.get("bits_per_weight") and row.get(key)]
    if not measured:
        return ""
    points: dict[tuple[str, bool], list[tuple[float, float]]] = {}  # by method, or by other library
    for row in measured:
        name = row.get("peer", row["method"]), "peer" in row
        points.setdefault(name, []).append((row["bits_per_weight"], row[key]))
    series = [
        Series(name, sorted(found), "base" if peer else _STYLES[index % len(_STYLES)], index, line=not peer)
        for index, ((name, peer), found) in enumerate(points.items())
    ]
    exact = [row[key] for row in rows if row["method"] == "unquantized" and row.get(key)]
    levels = [(exact[0], "unquantized")] if exact else []
    title = f"Bits per weight against {label.split(',')[0]}"
    return svg.draw(Chart(title, Axis("bits per weight"), Axis(label, log=log), series, levels=levels))


def _row(row: Mapping[str, Any]) -> Row:
    specs = {"bits_per_weight": ".2f", "nmse": ".5f", "perplexity": ".3f", "kl_divergence": ".4f"}
    return Row(
        [row["model"], row["method"], *(markup.number(row.get(key), spec) for key, spec in specs.items())]
    )


def _demo(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        rows = result.data["rows"]
        specs = {
            "bits_per_weight": ".2f",
            "megabytes": ".0f",
            "perplexity": ".2f",
            "kl_divergence": ".3f",
            "tokens_per_second": ".1f",
        }
        body = [
            Row(
                [
                    row["model"],
                    row["quantized"],
                    *(markup.number(row.get(key), spec) for key, spec in specs.items()),
                ]
            )
            for row in rows
        ]
        headers = ["model", "quantized", "bits per weight", "MB", "perplexity", "KL divergence", "tokens/s"]
        parts.append(markup.heading(f"{result.device}, {result.name}"))
        parts.append(markup.table(headers, body, f"{result.data['eval_tokens']} tokens scored", left=2))
    return "".join(parts)


SECTIONS = (
    Section(
        "quality",
        "Quality",
        "Perplexity, and KL divergence from the unquantized model, which sees damage that perplexity "
        "averages away. Lower is better in both, and further left is smaller.",
        ("quality",),
        "kbit eval MODEL --bits 2,3,4,5 --plain --calibrate other.txt --peers --text heldout.txt "
        "--json {folder}/quality.json",
        _quality,
    ),
    Section(
        "demo",
        "Demo",
        "A real small model in 4, 3 and 2 bits on a CPU. Its published weights were 4-bit already: this "
        "shows that things work, not how good they are.",
        ("demo",),
        "make demo DEMO_ARGS='--json {folder}/demo.json'",
        _demo,
    ),
)
