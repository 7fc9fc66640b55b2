"""Options of `transformers serve`, looked at before a model is loaded: some it finds wrong afterwards."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Sequence
from typing import Any

import torch

from kbit.cli.options import one_of
from kbit.cli.serve_template import wrong_template_kwargs
from kbit.integrations.devices import find_device

_PORTS = range(2**16)
# What --device may be beside one: ways of spreading a model over all.
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


def check_options(arguments: Sequence[str]) -> None:
    """Look at options that follow the model.

    Raises:
        OSError: the server could not listen at its address.
        ValueError: an option has no value, or one of no use.
    """
    _check_address(_value(arguments, "host", "localhost"), _value(arguments, "port", "8000"))
    _check_device(_value(arguments, "device", "auto"))
    _check_log_level(_value(arguments, "log-level", "warning"))
    _check_template_kwargs(_value(arguments, "chat-template-kwargs", "{}"))


def wrong_usage(arguments: Sequence[str]) -> str | None:
    """What transformers' command line finds wrong with the arguments of `serve`, or None.

    Itself it would print all of its options, as those of `kbit serve`.
    """
    import typer.main
    from transformers.cli.transformers import app

    commands: Any = typer.main.get_command(app) if isinstance(app, typer.Typer) else app  # of newer versions
    try:
        commands.commands["serve"].make_context("serve", [*arguments])
    except Exception as error:
        said = getattr(error, "format_message", None)  # what is wrong; else it is --help, say
        return said() if said else None
    return None


def _value(arguments: Sequence[str], name: str, default: str) -> str:
    """An option's value, which is the last one given; raises ValueError where it has none."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument(f"--{name}", dest="value", default=default)
    try:
        return parser.parse_known_args(arguments)[0].value
    except argparse.ArgumentError:
        raise ValueError(f"--{name} needs a value: --{name} {default}, for one.") from None


def _check_address(host: str, port: str) -> None:
    """Raises OSError where the server could not listen, and ValueError for a port that there is not."""
    try:
        number = int(port)
    except ValueError:
        return  # transformers' command line says so at once
    if number not in _PORTS:
        raise ValueError(f"--port must be from 0 to {_PORTS[-1]}, got {port}.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        raise OSError(
            f"cannot listen on port {port} of {host}: {error}. Stop what has that port, or name "
            "another: --port 8001, --host 127.0.0.1."
        ) from None


def _check_device(name: str) -> None:
    """Raises ValueError for what is no device's name, and for a GPU that torch does not see."""
    if name in _SPREAD:
        return
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind in ("", "cuda", "meta"):  # others compute by the reference
        find_device(name, "auto, cpu, cuda or cuda:1")


def _check_log_level(level: str) -> None:
    """Raises ValueError for a level that transformers does not know."""
    from transformers.utils.logging import log_levels

    if level.lower() not in log_levels:
        one_of("--log-level", level, tuple(log_levels))


def _check_template_kwargs(text: str) -> None:
    """Raises ValueError for arguments of the chat template that are none, or that the server has itself."""
    try:
        wrong = wrong_template_kwargs(json.loads(text or "{}"))
    except (ValueError, RecursionError) as error:
        wrong = f"must be JSON: {error}."
    if wrong:
        raise ValueError(f"--chat-template-kwargs {wrong} Got {text[:80]!r}.")
