"""The files of a model folder: its config and the tensors that its safetensors headers announce."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kbit.format.safetensors_header import TensorInfo, read_header
from kbit.format.strict_json import parse_json

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# What else holds the weights of a model, beside its safetensors files.
OTHER_WEIGHT_SUFFIXES = (*PICKLE_SUFFIXES, ".h5", ".msgpack", ".gguf", ".onnx", ".tflite", ".ot")
# The folder that `kbit quantize OUT` works in, beside OUT, and its file there.
PARTIAL_SUFFIX, JOURNAL_NAME = ".partial", "kbit-journal.json"

# The reason why transformers cannot load a model where it asks for trust_remote_code.
OWN_CODE = (
    "it needs code of its own (auto_map), and kbit runs none. Does a newer transformers know this "
    "architecture?"
)


def no_model(folder: Path) -> str:
    """What to say of a path without a model's config: what it is, and what to do."""
    what = "has no config.json" if folder.is_dir() else "is a file" if folder.is_file() else "is not a folder"
    beside = folder.with_name(folder.name + PARTIAL_SUFFIX) if folder.name else folder
    for work in (folder, beside):
        if (work / JOURNAL_NAME).is_file():
            remedy = f"{work} is of a kbit quantize that did not end: the same command goes on with it."
            return f"{folder} {what}. {remedy}"
    return f"{folder} {what}. Give a model's folder, or its name on the Hugging Face Hub as ORG/MODEL."


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`.

    Raises:
        ValueError: there is none, or it is not a JSON object.
    """
    path = Path(folder) / CONFIG_NAME
    if not path.is_file():
        raise ValueError(no_model(path.parent))
    return _read_object(path, not_finite=True)


def _read_object(path: Path, not_finite: bool = False) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes(), not_finite)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}). Fetch the file again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(content).__name__}.")
    return content


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a checkpoint, in order.

    Args:
        folder: a model folder.

    Raises:
        ValueError: no such folder, only pickled weights, no weights, or an index that names files that are
            missing or outside the folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(no_model(folder))
    if weight_map := _weight_map(folder):
        return _shards(folder, weight_map)
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ValueError(
            f"{folder}: holds pickled weights only ({', '.join(pickles[:3])}). Loading a pickle runs code "
            f"from it, so kbit refuses; convert the model with save_pretrained."
        )
    raise ValueError(f"{folder}: has neither {SINGLE_NAME} nor {INDEX_NAME}. Is it a model folder?")


def _weight_map(folder: Path) -> dict[str, str]:
    """{tensor: shard} of the index; empty where one file holds all."""
    path = folder / INDEX_NAME
    # In this order, as transformers, whose save_pretrained leaves the index of a model that it overwrites.
    if (folder / SINGLE_NAME).is_file() or not path.is_file():
        return {}
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map must map tensor names to files.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or re.search(r"[/\\\0]", file):
            raise ValueError(
                f"{path}: tensor {name!r} is said to be in {str(file)[:80]!r}; shards must be *.safetensors "
                f"files of the same folder."
            )
    return weight_map


def _shards(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    """The files that an index names, in order; each is looked for once, however many tensors it holds."""
    first = {file: name for name, file in reversed(weight_map.items())}
    for file, name in sorted(first.items()):
        if not (folder / file).is_file():
            raise ValueError(
                f"{folder / INDEX_NAME}: tensor {name!r} is said to be in {file}, which is missing. "
                f"Fetch that shard."
            )
    return [folder / file for file in sorted(first)]


def read_index(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of a checkpoint, from headers alone.

    Args:
        folder: a model folder.

    Returns:
        {tensor name: TensorInfo}, file by file, in the order of the data.

    Raises:
        ValueError: a file is damaged or pickled, a shard is missing, a name occurs twice, or the index names
            tensors that its file does not hold.
    """
    folder = Path(folder)
    tensors: dict[str, TensorInfo] = {}
    weight_map = _weight_map(folder)
    for path in _shards(folder, weight_map) if weight_map else checkpoint_files(folder):
        for name, info in read_header(path).items():
            if name in tensors:
                raise ValueError(
                    f"{path}: tensor {name!r} is in {tensors[name].file.name} too. Remove the one that "
                    f"is not the model's, or fetch the model again."
                )
            tensors[name] = info
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(
                f"{folder / INDEX_NAME}: tensor {name!r} is not in {file} as stated. Fetch both files "
                f"again, or take the name out of the index if the model has no such tensor."
            )
    return tensors
