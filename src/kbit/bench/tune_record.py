"""The file that `kbit tune` writes: whole at any time, and taken up again after an interruption."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kbit.backends.cuda import tables
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.tables import Problem, Row, TableError
from kbit.backends.cuda.wgmma_config import TOKENS
from kbit.bench.result_files import replace_text

ABOUT = (
    "Fastest CUDA kernel by problem, and the runner-up: medians in microseconds, cold weights, graph replays"
)
# Rows are only added to those that were measured with the same.
SAME = ("gpu", "driver", "cuda", "torch", "sources")


class Record:
    """Rows by problem and tokens.

    Args:
        file: written by `save`; rows that are there already are kept unless `fresh`.
        device: of the GPU.
        provenance: what it is measured with; has the fields `SAME`.
        fresh: forget what the file holds.

    Raises:
        ValueError: the file is no table, or was measured with something else.
    """

    def __init__(
        self, file: Path, device: DeviceLimits, provenance: Mapping[str, object], fresh: bool = False
    ) -> None:
        self.file, self.device, self.provenance = file, device, dict(provenance)
        self._rows: dict[tuple[Problem, int], Row] = {}
        self._saved = False
        if not fresh:
            self._take_up()

    def _take_up(self) -> None:
        remedy = "--fresh starts over, --out names another file."
        try:
            table = tables.load(self.file)
            if table is None:
                return
            before = json.loads(self.file.read_bytes()).get("provenance")
            if not isinstance(before, dict):
                raise TableError("it has no provenance")
        except TableError as error:
            raise ValueError(f"tune: {self.file} cannot be gone on with: {error}. {remedy}") from None
        now = self.provenance | {"device": self.device._asdict()}
        for name in (*SAME, "device"):
            old = table.device._asdict() if name == "device" else before.get(name)
            if old != now.get(name):
                raise ValueError(
                    f"tune: {self.file} was measured with {name} {old}, this is {now.get(name)}. {remedy}"
                )
        self._rows = {(problem, row.m): row for problem, rows in table.rows.items() for row in rows}
        self._saved = True

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, problem: Problem, m: int) -> bool:
        """Whether a row is there."""
        return (problem, m) in self._rows

    def add(self, problem: Problem, row: Row) -> None:
        """Keep a row until `save`."""
        self._rows[problem, row.m] = row
        self._saved = False

    def rows(self) -> list[tuple[Problem, Row]]:
        """All rows in the file's order."""
        order = sorted(self._rows, key=lambda key: (*asdict(key[0]).values(), key[1]))
        return [(key[0], self._rows[key]) for key in order]

    def save(self) -> None:
        """Write the file; readers see all of it or the one before.

        Raises:
            OSError: it cannot be written.
        """
        if self._saved or not self._rows:
            return
        head: dict[str, Any] = {
            "about": ABOUT,
            "version": tables.VERSION,
            "device": self.device._asdict(),
            "provenance": self.provenance,
            "tokens": TOKENS,
        }
        lines = ",\n  ".join(json.dumps(tables.write_row(*pair)) for pair in self.rows())
        text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n'
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.file, text)
        self._saved = True
