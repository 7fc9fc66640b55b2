"""The page: headline figures, navigation, sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path

from kbit._version import __version__
from kbit.bench.kernel_rows import compare
from kbit.bench.report import experts, kernels, machines, markup, models, nvfp4, quality, tasks
from kbit.bench.report.results import Result, load
from kbit.bench.report.sections import Section

SECTIONS: tuple[Section, ...] = (
    *kernels.SECTIONS,
    *experts.SECTIONS,
    *models.SECTIONS,
    *tasks.SECTIONS,
    *nvfp4.SECTIONS,
    *quality.SECTIONS,
    *machines.SECTIONS,
)

# What reading a value raises that is of another type than it should be, or absent, or 0.
_DAMAGE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def write(folder: Path, file: Path) -> list[str]:
    """Write the page for a folder of result files.

    Args:
        folder: holds the .json files that `--json` options wrote.
        file: the page.

    Returns:
        Titles of the sections that are absent.

    Raises:
        OSError: something cannot be read or written.
        ValueError: a file is damaged, or there is none.
    """
    page, absent = render(load(folder), folder)
    file.write_text(page, encoding="utf-8")
    return absent


def render(results: Sequence[Result], folder: Path) -> tuple[str, list[str]]:
    """The page, and the titles of the sections that are absent.

    Raises:
        ValueError: a file lacks what its kind has.
    """
    bodies = {section: _body(section, results) for section in SECTIONS}
    extra = {machines.OTHERS: _body(machines.OTHERS, results)}
    last = {machines.PROVENANCE: _rendered(machines.PROVENANCE.title, machines.PROVENANCE.render, results)}
    bodies |= {section: body for section, body in extra.items() if body} | last
    sections = "".join(_section(section, body, folder) for section, body in bodies.items())
    absent = [section.title for section, body in bodies.items() if not body]
    style = resources.files("kbit.bench.report").joinpath("page.css").read_text(encoding="utf-8")
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kbit, measured</title><style>\n{style}</style></head><body>"
        '<a class="skip" href="#top">To the results</a><div class="frame">'
        f'<nav aria-label="Sections"><ol>{"".join(_link(*item) for item in bodies.items())}</ol></nav>'
        f'<main id="top">{_rendered("the title", _header, results)}{sections}'
        f"<footer>Made by <code>kbit bench report</code>, kbit {markup.escape(__version__)}.</footer>"
        "</main></div></body></html>\n"
    )
    return page, absent


def _body(section: Section, results: Sequence[Result]) -> str:
    """A section's content; "" where no file has any."""
    mine = [result for result in results if result.kind in section.kinds]
    return _rendered(section.title, section.render, mine) if mine else ""


def _rendered(title: str, render: Callable[[Sequence[Result]], str], results: Sequence[Result]) -> str:
    """A part of the page.

    Raises:
        ValueError: a file lacks what its kind has, or has something else there.
    """
    try:
        return render(results)
    except _DAMAGE as error:
        names = [result.name for result in results if not _can_be_shown(render, result)]
        raise ValueError(
            f"bench report: {', '.join(names or [result.name for result in results])} cannot be shown under "
            f"{title!r} ({type(error).__name__}: {error}). Was it written by another version? Measure again, "
            f"or remove the file."
        ) from error


def _can_be_shown(render: Callable[[Sequence[Result]], str], result: Result) -> bool:
    """Whether a part of the page can be made of one file alone."""
    try:
        render([result])
    except _DAMAGE:
        return False
    return True


def _section(section: Section, body: str, folder: Path) -> str:
    about = markup.paragraph(section.about, "about")
    if not body:
        command = section.command.format(folder=folder.as_posix())
        body = markup.paragraph(f"Absent: no result file has it. It is made by `{command}`")
        about = ""
    style = ' class="absent"' if not about else ""
    return (
        f'<section id="{section.anchor}" aria-labelledby="{section.anchor}-title"{style}>'
        f'<h2 id="{section.anchor}-title">{markup.escape(section.title)}</h2>{about}{body}</section>'
    )


def _link(section: Section, body: str) -> str:
    style, more = ("", "") if body else (' class="absent"', " (absent)")
    return f'<li><a href="#{section.anchor}"{style}>{markup.escape(section.title)}{more}</a></li>'


# -- the top -------------------------------------------------------------------------------------------------


def _header(results: Sequence[Result]) -> str:
    devices = list(dict.fromkeys(result.device for result in results if result.machine))
    dates = sorted({str(result.machine["date"]) for result in results if "date" in result.machine})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "no date"
    lead = f"{len(results)} result files, {when}: {'; '.join(devices)}."
    figures = list(_figures(results))
    return (
        "<header><h1>kbit, measured</h1>"
        + markup.paragraph(lead, "lead")
        + (markup.tiles(figures) if figures else "")
        + "</header>"
    )


def _figures(results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Headlines, each from the first file that has it; losses as well as gains."""
    for result in (result for result in results if result.kind == "kernels"):
        found = compare(kernels.rows_of(result))
        if not found:
            continue
        best = max(found, key=lambda item: item.speedup(item.dispatched))
        base = best.baseline
        place = f"as fast as {base.dtype} cuBLAS at best: {base.shape}, M={base.rows}, k={best.bits}"
        yield f"{best.speedup(best.dispatched):.2f}x", place
        share = max(item.dispatched.gb_s for item in found) / float(result.data["read_bandwidth_gb_s"])
        yield f"{100 * share:.0f}%", "of the measured read bandwidth at best"
        least = min(found, key=lambda item: item.speedup(item.dispatched))
        base = least.baseline
        place = f"as fast as {base.dtype} cuBLAS at worst: {base.shape}, M={base.rows}, k={least.bits}"
        yield f"{least.speedup(least.dispatched):.2f}x", place
        ahead = sum(item.speedup(item.dispatched) >= 1 for item in found)
        yield f"{ahead} of {len(found)}", "measured problems at least as fast as 16 bits"
        break
    for result in (result for result in results if result.kind == "quality"):
        rows = [row for row in result.data["rows"] if row.get("bits") == 4 and row.get("kl_divergence")]
        if rows:
            row = min(rows, key=lambda row: float(row["kl_divergence"]))
            yield f"{row['kl_divergence']:.4f}", f"nats of KL divergence at 4 bits, {result.data['model']}"
            break
