"""The `kbit` command; each file imports what is slow only when it runs.

A command has a file of its name. bench_*: those of `kbit bench`; bench_kernels has check, dequant and plot,
too. serve_*: what is changed of transformers' server, one concern a file. model_folder, hub, texts: what
commands are given; options, outputs, consoles, tables: options, files, and what is printed.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Annotated

import typer

from kbit import _startup
from kbit._version import __version__
from kbit.cli import bench
from kbit.cli.compile import compile_kernels
from kbit.cli.consoles import Console
from kbit.cli.demo import demo
from kbit.cli.doctor import doctor
from kbit.cli.eval import evaluate
from kbit.cli.gate import gate
from kbit.cli.generate import generate
from kbit.cli.inspect import inspect
from kbit.cli.options import speak_of_options
from kbit.cli.outputs import Command
from kbit.cli.profile import profile
from kbit.cli.quantize import quantize
from kbit.cli.serve import command as serve
from kbit.cli.tune import tune

app = typer.Typer(
    help="LLM weights in 2 to 5 bits: quantize, look inside, talk, measure.",
    epilog="To begin with: kbit doctor; kbit quantize IN OUT --bits 4; kbit generate OUT 'Hello'.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes leave long options' help 16 columns of 80
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quantize)
app.command(context_settings={"allow_extra_args": True})(inspect)
app.command()(generate)
app.command("serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command("eval")(evaluate)
app.command(context_settings={"allow_extra_args": True})(doctor)
app.command()(demo)
app.command()(profile)
app.command("compile")(compile_kernels)
app.command()(tune)
app.command()(gate)
app.add_typer(bench.app, name="bench")
for command in (*app.registered_commands, *bench.app.registered_commands):
    command.cls = Command


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kbit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    if debug:
        os.environ["KBIT_DEBUG"] = "1"


def main() -> None:
    """Run the command line; what goes wrong is one line on stderr and exit code 1, after Ctrl-C 130."""
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no second one
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, _stop)
    try:
        _startup.imported()
        # As stderr does: what cannot be said in a locale, or a name that is no UTF-8, must not end a command.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        speak_of_options()
        app()
    except KeyboardInterrupt:  # outside of a command, whose own typer catches
        print(_startup.MESSAGE, file=sys.stderr)
        sys.exit(_startup.EXIT_CODE)
    except SystemExit as end:
        if end.code == _startup.EXIT_CODE:  # typer's for Ctrl-C, which says nothing
            print(_startup.MESSAGE, file=sys.stderr)
        raise
    except Exception as error:
        if os.environ.get("KBIT_DEBUG") or not _is_explained(error):
            raise
        # Of these kbit raises some, and others are its bugs.
        hint = " [dim](--debug shows where)[/dim]" if isinstance(error, TypeError | RuntimeError) else ""
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/bold red] {escape(error)}{hint}")
        sys.exit(1)


def _is_explained(error: Exception) -> bool:
    """Whether a message says what is wrong with the input or the machine; else it is a bug, with a traceback.

    Libraries that read model folders have exceptions of their own for files and configs that are damaged.
    """
    if isinstance(error, ValueError | TypeError | OSError | ImportError | RuntimeError):
        return True
    return type(error).__module__.partition(".")[0] in ("huggingface_hub", "safetensors", "tokenizers")


def _stop(number: int, _: object) -> None:
    """Leave as at Ctrl-C, so that servers are stopped and temporary folders removed on the way."""
    sys.exit(128 + number)


def escape(error: Exception) -> str:
    """An exception's message for rich, its brackets taken literally; the system's own with a remedy."""
    from rich.markup import escape as escape_markup

    message = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror:  # without the number
        message = error.strerror
        if error.filename is not None:  # the system's, which has no remedy
            message = f"{error.filename}: {message}. Is the path right, and is this user allowed to use it?"
    # Python's own sentence has no remedy; those of kbit have one, and no name.
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        message += f", which this command needs. Install it: pip install {package}"
    return escape_markup(message)
