"""Files outside of docs/ that its pages link to: the changelog, the examples, how to contribute.

Pages link to them as `../examples/lora.py`, which a repository browser understands; the site has copies of
its own.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Path in the repository -> path among the pages.
PAGES = {"CHANGELOG.md": "changelog.md"}
COPIES = {
    str(path.relative_to(ROOT)): f"repository/{path.name}.txt"
    for path in [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.py"))]
}
_OUTSIDE = re.compile(r"\]\(\.\./([^)#]+)\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add them to the site."""
    for source, target in {**PAGES, **COPIES}.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to them at the site's copies; what is unknown stays, and the build warns of it."""

    def copy_of(link: re.Match[str]) -> str:
        return f"]({ {**PAGES, **COPIES}.get(link[1], '../' + link[1]) })"

    return _OUTSIDE.sub(copy_of, markdown)
