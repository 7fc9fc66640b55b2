"""The command line's options as tables, for tools/render_docs.py."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from kbit.cli import app

_METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def commands() -> dict[str, Any]:
    """Every command by its words after `kbit`."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, child in getattr(command, "commands", {}).items():
            yield from walk(child, (*words, name))
        if not hasattr(command, "commands"):
            yield " ".join(words), command

    return dict(walk(typer.main.get_command(app), ()))


def options(command: Any) -> str:
    """The arguments and options of a command."""
    hints = typing.get_type_hints(command.callback)
    body = []
    for parameter in command.params:
        names = [f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts)]
        metavar, many = _metavar(parameter, hints.get(parameter.name))
        if parameter.param_type_name == "argument":
            names = [f"`{parameter.metavar or parameter.name.upper()}`"]
        elif metavar:
            names[-1] = f"{names[-1][:-1]} {metavar}`"
        many = many and "repeatable" not in (parameter.help or "")
        meaning = " ".join(filter(None, [parameter.help, "Repeatable." if many else ""]))
        body.append([", ".join(names), _default(parameter), meaning.replace("|", "\\|")])
    rows = [" | ".join(cells) for cells in (["option", "default", "meaning"], ["---"] * 3, *body)]
    return "\n".join(f"| {row} |" for row in rows)


def _default(parameter: Any) -> str:
    default = parameter.default
    if isinstance(default, bool):
        return ("`on`" if default else "`off`") if parameter.secondary_opts else ""
    if parameter.required or default is None or default in ("", (), []):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _metavar(parameter: Any, hint: Any) -> tuple[str, bool]:
    """What stands for the value of an option, and whether it may be given several times."""
    arms = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        hint = arms[0]
    many = typing.get_origin(hint) is list
    if many:
        hint = typing.get_args(hint)[0]
    if hint is bool:
        return "", False
    values = [choice.value for choice in hint] if hasattr(hint, "__members__") else []
    return parameter.metavar or "/".join(values) or _METAVARS.get(hint, "VALUE"), many
