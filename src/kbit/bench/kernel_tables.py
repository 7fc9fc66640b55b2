"""The tables of `kbit bench kernels`: one per dtype and M, with every kernel, cuBLAS and the targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.table import Table

from kbit.bench import targets
from kbit.bench.kernel_rows import Comparison, KernelRow, Total, compare, totals
from kbit.bench.targets import Target
from kbit.bench.text_table import in_sections, text_table

STYLES = {"goal": "green", "floor": "yellow", "below": "red"}
# A figure above the read bandwidth means that the weights were not cold.
WARM = 1.1
NOTE = (
    "us, median; best: fastest of ours with its spread (max - min) / median, its packed bytes over its time, "
    "and their share of the measured read bandwidth; floor/goal (H200): what dispatched kbit has to reach, "
    "and what it did"
)


def tables(rows: Sequence[KernelRow], bandwidth: float) -> Iterator[Table]:
    """A table per dtype and M of rows in any order; `bandwidth` in GB/s."""
    comparisons = compare(rows)
    for key in dict.fromkeys((item.baseline.dtype, item.baseline.rows) for item in comparisons):
        chosen = [item for item in comparisons if (item.baseline.dtype, item.baseline.rows) == key]
        yield table(chosen, bandwidth)


def table(comparisons: Sequence[Comparison], bandwidth: float) -> Table:
    """One table; all comparisons share dtype and M."""
    first = comparisons[0].baseline
    names = list(dict.fromkeys(itertools.chain.from_iterable(item.kernels for item in comparisons)))
    headers = ["shape", "k", *names, first.dtype, "best", f"vs {first.dtype}", "spread", "GB/s", "% read"]
    headers.append("floor/goal")
    result = text_table(f"M={first.rows}, {first.dtype}", headers, left=("shape", "best"), no_wrap=True)
    at_four = {item.baseline.shape: item.dispatched.us for item in comparisons if item.bits == 4}
    for item in in_sections(result, comparisons, lambda item: item.baseline.shape):
        result.add_row(*_cells(item, names, bandwidth, at_four.get(item.baseline.shape)))
    _add_totals(result, totals(comparisons), len(names))
    return result


def _cells(item: Comparison, names: list[str], bandwidth: float, at_four: float | None) -> list[str]:
    best = item.best
    times = [f"{item.kernels[name].us:.1f}" if name in item.kernels else "-" for name in names]
    return [
        item.baseline.shape,
        str(item.bits),
        *times,
        f"{item.baseline.us:.1f}",
        best.kernel,
        _ratio(item.speedup(best)),
        f"{100 * best.spread:.0f}%",
        f"{best.gb_s:.0f}",
        _share(item, bandwidth),
        _target(item, at_four),
    ]


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value >= 1 else f"[red]{value:.2f}x[/]"


def _share(item: Comparison, bandwidth: float) -> str:
    share = item.best.gb_s / bandwidth
    text = f"{100 * share:.0f}"
    if share > WARM:
        return f"[red]{text} warm?[/]"
    return _colored(text, targets.read_bandwidth(item.baseline.shape, item.baseline.rows, item.bits), share)


def _colored(text: str, target: Target | None, value: float) -> str:
    return text if target is None else f"[{STYLES[target.verdict(value)]}]{text}[/]"


def _target(item: Comparison, at_four: float | None) -> str:
    shape, count = item.baseline.shape, item.baseline.rows
    most = targets.width_ratio(shape, count, item.bits)
    if most is not None and at_four is not None:
        ratio = item.dispatched.us / at_four
        verdict = "goal" if ratio <= most else "below"
        return f"[{STYLES[verdict]}]{ratio:.2f} of k=4, at most {most:.2f}: {verdict}[/]"
    target = targets.speedup(shape, count, item.bits)
    if target is not None:
        verdict = target.verdict(item.speedup(item.dispatched))
        return f"[{STYLES[verdict]}]{target.floor:g}/{target.goal:g}: {verdict}[/]"
    least = targets.never_slower(shape, count, item.bits)
    return "" if item.speedup(item.dispatched) >= least else f"[red]{least:g}: below[/]"


def _add_totals(result: Table, sums: Sequence[Total], kernels: int) -> None:
    """TOTAL rows: time of a block's layers, each as often as it runs, at each width."""
    models = list(dict.fromkeys(total.model for total in sums))
    for model in models:
        result.add_section()
        blanks = [""] * kernels
        result.add_row(f"TOTAL {model}", "", *blanks, style="bold")
        for total in (total for total in sums if total.model == model):
            base = f"{total.baseline_us:.1f}"
            best = f"{total.us:.1f}"
            result.add_row(f"  k={total.bits}", str(total.bits), *blanks, base, best, _ratio(total.speedup))


def losses(rows: Sequence[KernelRow], margin: float = 0.05) -> Iterator[str]:
    """A line for each problem where a kernel of ours or a peer beats the dispatched one by over `margin`."""
    for item in compare(rows):
        ours = item.dispatched
        fastest = min(item.kernels.values(), key=lambda row: row.us)
        if ours.us > fastest.us * (1 + margin):
            base = item.baseline
            yield (
                f"{base.shape} M={base.rows} k={item.bits} {base.dtype}: {fastest.kernel} takes "
                f"{fastest.us:.1f} us, {ours.kernel} {ours.us:.1f} us"
            )
