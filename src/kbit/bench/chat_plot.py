"""Picture of a result of `kbit bench chat --json`: the wait for the first token, by length of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbit.bench.chat import KEPT
from kbit.bench.generate_plot import rows_in
from kbit.bench.plots import color_of, figure_of, save


def is_chat(result: Mapping[str, Any]) -> bool:
    """Whether a result file is one of a chat: rows with a turn."""
    return any("turn" in row for row in rows_in(result))


def lines(result: Mapping[str, Any]) -> dict[tuple[str, str], dict[int, float]]:
    """{(arm, way): {tokens of the prompt: milliseconds}}, in the order of the file."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in result["rows"]:
        found.setdefault((row["arm"], row["way"]), {})[row["prompt"]] = 1e3 * row["first_token_s"]
    return found


def write(result: Mapping[str, Any], folder: Path, sources: Sequence[Path] = ()) -> Path:
    """Write chat-MODEL.png: a line for each arm and way.

    `sources`: as `plots.save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    figure, (axes,) = figure_of(1, 1)
    for (arm, way), waits in lines(result).items():
        style = "o-" if way == KEPT else "o--"
        axes.plot(list(waits), list(waits.values()), style, color=color_of(arm), label=f"{arm}, {way}")
    axes.set_xlabel("tokens of the prompt, turn by turn")
    axes.set_ylabel("ms until the first token")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2)
    axes.set_title(f"chat, {result['model']}, {result['machine'].get('gpu') or 'CPU'}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"chat-{Path(result['model']).stem}.png"
    save(figure, file, sources)
    return file
