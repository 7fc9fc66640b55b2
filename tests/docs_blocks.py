"""The blocks of code in README.md and docs/: found, sorted by page and language."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<why>[^>]+?) -->\n)?(?P<indent>[ ]*)```(?P<language>\w*)\n"
    r"(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block; `why` it is not run, if so."""

    page: Path
    line: int
    language: str
    text: str
    why: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text[: found.start()].count("\n") + 1, found["language"], found["text"], found["why"])
        for found in _FENCE.finditer(text)
    ]


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def blocks(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]
