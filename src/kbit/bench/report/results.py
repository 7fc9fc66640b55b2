"""Result files of a folder, each known by its content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbit.format.strict_json import parse_json

# What a file is, and the keys that tell it; the first that fits.
KINDS: Mapping[str, Iterable[str]] = {
    "workload": ("workload", "scheduler"),
    "profile": ("profiles",),
    "demo": ("rows", "eval_tokens"),
    "quality": ("rows", "window"),
    "dequantize": ("row_kernels",),
    "kernels": ("rows", "read_bandwidth_gb_s"),
    "cpu": ("linear", "quantize"),
    "decode": ("decode",),
    "model": ("arms", "plan"),
    "generate": ("rows", "plan", "layers"),
    "serve": ("models", "options"),
    "quantize": ("runs", "policy"),
    "sanitizer": ("runs", "shapes"),
}
# Kinds that differ in their rows, or arms, only: by a key of the first.
_OF_ROWS = {
    "dequantize": "dequantize_us",
    "nvfp4": "quantized_rows",
    "moe": "problem",
    "attention": "cache_bytes",
}
_OF_ARMS = {"train": "adapter_bytes"}
_OF_TURNS = {"chat": "turn"}
# By kind, which others its files may be, and of what that is told.
_APART: Mapping[str, tuple[Mapping[str, str], str]] = {
    "kernels": (_OF_ROWS, "rows"),
    "model": (_OF_ARMS, "arms"),
    "generate": (_OF_TURNS, "rows"),
}
OTHER = "other"


@dataclass(frozen=True)
class Result:
    """One result file. `sha256` is of its bytes."""

    name: str
    kind: str
    data: Mapping[str, Any]
    sha256: str

    @property
    def machine(self) -> Mapping[str, Any]:
        """What it was measured on; empty where the file does not say."""
        machine = self.data.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def device(self) -> str:
        """The GPU, or the CPU with its threads."""
        machine = self.machine
        if machine.get("gpu"):
            return str(machine["gpu"])
        threads = f", {machine['threads']} threads" if machine.get("threads") else ""
        return f"{machine.get('cpu', 'unknown machine')}{threads}"


def kind_of(data: Mapping[str, Any]) -> str:
    """What a file's content is."""
    kind = next((kind for kind, keys in KINDS.items() if all(key in data for key in keys)), OTHER)
    others, items = _APART.get(kind, ({}, ""))
    first = (data.get(items) or [{}])[0]
    return next((other for other, key in others.items() if key in first), kind)


def load(folder: Path) -> list[Result]:
    """Every .json file of a folder, by name.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is none, or one is no JSON object.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"bench report: {folder} is not a folder. Give the folder of result files.")
    results = [_read(path) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(
            f"bench report: {folder} holds no .json file. Write some with --json, for example "
            f"kbit bench kernels --json {folder}/kernels.json"
        )
    return results


def _read(path: Path) -> Result:
    content = path.read_bytes()
    try:
        data = parse_json(content)
    except ValueError as error:
        raise ValueError(f"bench report: {path} is not JSON ({error}). Repair or remove it.") from None
    if not isinstance(data, dict):
        raise ValueError(
            f"bench report: {path} holds a {type(data).__name__}, a result file holds an object. Remove it."
        )
    try:
        kind = kind_of(data)
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"bench report: {path} has no list of objects where its results should be "
            f"({type(error).__name__}: {error}). Measure again, or remove the file."
        ) from error
    return Result(path.name, kind, data, hashlib.sha256(content).hexdigest())
