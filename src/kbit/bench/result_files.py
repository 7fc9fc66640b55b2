"""Files that users name: one line says what is wrong with those that are read; written ones are whole."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kbit.format.strict_json import parse_json


def as_json(rows: Iterable[Any]) -> list[dict[str, Any]]:
    """Rows, which are dataclasses, as a result file has them."""
    return [asdict(row) for row in rows]


def replace_text(file: Path, text: str) -> None:
    """Write a file so that readers find, at any moment, the old one or the new one.

    Raises:
        OSError: the disk is full, say; the old file is still there.
    """
    # Not made from the file's name, which may be as long as names can be.
    new = file.with_name(f".kbit-{secrets.token_hex(8)}.new")
    try:
        new.write_text(text)
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def read_text(path: Path, name: str, remedy: str) -> str:
    """The text of a file; `name` is what messages call it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error}). {remedy}") from None
    except OSError as error:
        raise OSError(f"{name} cannot be read: {error.strerror}. {remedy}") from None


def read_result(path: Path, command: str) -> dict[str, Any]:
    """What the `--json` option of a command wrote.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no JSON object, or says what machine in no object.
    """
    text = read_text(path, str(path), remedy(command))
    try:
        result = parse_json(text.encode(), not_finite=True)  # whose field is named later
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}). {remedy(command)}") from None
    if not isinstance(result, dict) or not isinstance(result.get("machine", {}), dict):
        raise no_result(path, command, "it or its machine is no object")
    return result


def no_result(path: Path, command: str, why: object) -> ValueError:
    """The error of a file that another command wrote, or nobody."""
    if isinstance(why, KeyError):
        why = f"it has no {why}"
    what = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
    return ValueError(f"{path} is not a result of `{command} --json` ({what}). {remedy(command)}")


def remedy(command: str) -> str:
    """How to get such a file."""
    return f"Make one: {command} --json FILE"
