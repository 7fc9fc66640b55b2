"""Files and folders that commands write: refused before the work, and whole whenever they are read."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from kbit.bench.result_files import replace_text
from kbit.format.model_files import CONFIG_NAME, OTHER_WEIGHT_SUFFIXES

_PICTURES = (".png", ".svg", ".pdf")
# How files of JSON end that a model's folder has.
_OF_MODELS = (CONFIG_NAME, ".index.json", "tokenizer.json", "vocab.json", "tokens_map.json", "modules.json")


def check_file(file: Path | None) -> Path | None:
    """Refuse a file that cannot be written, before hours are spent on what belongs there."""
    if file is None:
        return None
    if file.is_dir():
        raise typer.BadParameter(f"{file} is a folder. Name a file in it.")
    weights = (".safetensors", *OTHER_WEIGHT_SUFFIXES)
    if file.is_file() and (file.suffix in weights or file.name.endswith(_OF_MODELS)):
        raise typer.BadParameter(f"{file} is a file of a model. Name another place.")
    if not file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.parent}. Create it first.")
    if not os.access(file.parent if _can_be_replaced(file) else file, os.W_OK):
        raise typer.BadParameter(f"{file} cannot be written. Name another place.")
    return file


def check_page(file: Path | None) -> Path | None:
    """The same for a page, which is no result."""
    if file is not None and file.suffix == ".json":
        raise typer.BadParameter(f"{file} would not be JSON. Name it .html.")
    return check_file(file)


def check_picture(file: Path | None) -> Path | None:
    """The same for a picture."""
    if file is not None and file.suffix.lower() not in _PICTURES:
        raise typer.BadParameter(f"{file} must end with one of {', '.join(_PICTURES)}.")
    return check_file(file)


def refuse_overwriting(outputs: Mapping[str, Path | None], inputs: Iterable[Path]) -> None:
    """Refuse outputs, by option, that are inputs, or one file.

    Raises:
        ValueError: they are.
    """
    taken = {path.resolve(): f"{path} is read, too" for path in inputs}
    for option, path in outputs.items():
        if path is not None and (why := taken.get(path.resolve())):
            raise ValueError(f"{option}: {why}. Name another file.")
        if path is not None:
            taken[path.resolve()] = f"{path} is that of another option, too"


class Command(TyperCommand):
    """A command whose arguments are in capitals, and that refuses to write over what it reads."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        """What typer's takes."""
        super().__init__(*args, **kw)
        for parameter in self.params:
            if isinstance(parameter, TyperArgument) and parameter.name:
                parameter.metavar = parameter.metavar or parameter.name.upper()

    def invoke(self, ctx: Any) -> Any:
        """Run it.

        Raises:
            ValueError: a file that it is to write is among its inputs, or named twice.
        """
        checks, written = (check_file, check_page, check_picture), {}
        for parameter in self.params:
            if getattr(parameter.callback, "__wrapped__", None) in checks and parameter.name:
                written[parameter.name] = parameter.opts[0], ctx.params.get(parameter.name)
        read = [value for name, value in ctx.params.items() if name not in written]
        refuse_overwriting(dict(written.values()), _files_in(read))
        return super().invoke(ctx)


def _files_in(values: Iterable[Any]) -> Iterator[Path]:
    """The files that are named by values of arguments and options."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from _files_in(value)
        elif isinstance(value, str | Path) and os.path.isfile(value):  # of any text, as Path's is not
            yield Path(value)


def check_folder(folder: Path | None) -> Path | None:
    """Refuse a folder that cannot be made, or written in, in the same way."""
    if folder is None:
        return None
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is a file. Name a folder.")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"{there} cannot be written. Name another place.")
    return folder


PrintedJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def refuse_arguments(context: typer.Context, as_json: bool) -> None:
    """A usage error for arguments too many, such as a file for a --json that prints."""
    if context.args:
        hint = f" --json prints: {context.command_path} ... --json > FILE" if as_json else ""
        context.fail(f"Got unexpected extra argument(s) ({' '.join(context.args)}).{hint}")


JsonFile = Annotated[
    Path | None, typer.Option("--json", callback=check_file, help="Also write the results here.")
]


def write_json(file: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result, if a file is given: at any moment, a reader finds the old file or the new one.

    Raises:
        OSError: the disk is full, say; the old file is still there.
    """
    if file is None:
        return
    text = json.dumps(_in_json(result), indent=1, allow_nan=False) + "\n"
    if _is_stdout(file):  # /dev/stdout, perhaps redirected to a file
        sys.stdout.write(text)
        return
    if not _can_be_replaced(file):
        file.write_text(text)
        return
    replace_text(file.resolve(), text)  # of a link, what it points to


def print_json(result: Any) -> None:
    """Print a result, as `write_json` writes it."""
    print(json.dumps(_in_json(result), indent=1, allow_nan=False))


def _in_json(value: Any) -> Any:
    """A result with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_stdout(file: Path) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(1))
    except OSError:
        return False


def _can_be_replaced(file: Path) -> bool:
    """Whether another file can be renamed to it: not to /dev/stdout, nor in a folder of somebody else's."""
    return os.access(file.resolve().parent, os.W_OK) and (file.is_file() or not file.exists())
