"""What of a model's folder is copied as it is: tokenizer, chat templates, generation config and the like."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from kbit.format.model_files import CONFIG_NAME, INDEX_NAME, OTHER_WEIGHT_SUFFIXES
from kbit.format.strict_json import parse_json
from kbit.format.words import first_of

# Where transformers keeps named chat templates; the only folder inside a model folder that it reads.
CHAT_TEMPLATES = "additional_chat_templates"
# Where sentence-transformers lists what follows the model, each in a folder of its own: pooling, say.
MODULES_NAME = "modules.json"
# What the hub's tools leave in a folder that they fetch or publish, and make again.
HUB_CACHE = ".cache"


def other_files(source: Path) -> list[Path]:
    """A model's files but its config and weights, and those of folders that are read beside it, whole."""
    files = list(_files(source))
    _say_what_is_elsewhere(source, files)
    return files


def is_model(folder: Path) -> bool:
    """Whether a folder is that of a model, and not another program's that has a config.json, too."""
    config = folder / CONFIG_NAME
    if not config.is_file():
        return False
    if any(folder.glob("*.safetensors")) or (folder / INDEX_NAME).is_file():
        return True
    try:
        content = parse_json(config.read_bytes(), not_finite=True)
    except ValueError:
        return False
    return isinstance(content, dict) and "model_type" in content


def others_folders(folder: Path) -> list[str]:
    """Folders inside a model's that hold more than what is read beside it, such as .git."""
    known = {CHAT_TEMPLATES, HUB_CACHE, *_modules(folder)}
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name not in known)


def _files(source: Path) -> Iterator[Path]:
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", *OTHER_WEIGHT_SUFFIXES) or path.name.endswith(".index.json")
        weights = weights and not path.name.startswith("adapter_model.")  # as the model is loaded with it
        if path.is_file() and not weights and path.name != CONFIG_NAME:
            yield path
    for name in (CHAT_TEMPLATES, *_modules(source)):
        yield from (path for path in (source / name).rglob("*") if path.is_file())


def _say_what_is_elsewhere(source: Path, files: list[Path]) -> None:
    """Warn of links that lead out of a folder, but for the hub's cache, whose every file is one.

    Of a folder that a stranger made they may lead to what is the user's alone, and is copied.
    """
    whole = source.resolve()
    roots = [whole, *(parent.parent for parent in whole.parents if parent.name == "snapshots")]
    outside = [path for path in files if not any(path.resolve().is_relative_to(root) for root in roots)]
    if outside:
        names = first_of(str(path.relative_to(source)) for path in outside)
        warnings.warn(
            f"{source} has links to files that are elsewhere, whose content is copied: {names}. Look at it "
            f"before you publish the result.",
            stacklevel=2,
        )


def _modules(source: Path) -> list[str]:
    """The folders that sentence-transformers reads, as far as they are in this one."""
    try:
        listed = parse_json((source / MODULES_NAME).read_bytes())
    except (OSError, ValueError):
        return []
    entries = listed if isinstance(listed, list) else []
    names = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    inside = {path.name for path in source.iterdir() if path.is_dir() and not path.is_symlink()}
    return [name for name in dict.fromkeys(names) if isinstance(name, str) and name in inside]
