"""A `kbit` command that still imports torch: one line for Ctrl-C or for a missing package, as later on.

kbit/__init__.py imports torch, which takes a second, before anything of the command can run; so it imports
this module first. In other programs that import kbit, Ctrl-C and errors do what they did.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import TracebackType

MESSAGE = "Interrupted."
EXIT_CODE = 130  # 128 + SIGINT


def is_command() -> bool:
    """Whether this process was started as `kbit` or as `python -m kbit`."""
    given = sys.orig_argv[-len(sys.argv) :]
    if sys.argv[:1] == ["-m"]:  # until Python has found the module
        return given[:1] == ["kbit"]
    return given == sys.argv and os.path.basename("".join(given[:1])) in ("kbit", "kbit.exe")


def leave(number: int, _: object) -> None:
    """A signal's handler: end the process at once, whatever its threads do."""
    # Not by an exception, which imports may catch: of 30 interrupts spread over them, 2 had no effect.
    with suppress(AttributeError, OSError, RuntimeError, ValueError):  # closed, its reader gone, or in use
        sys.stdout.flush()
    if number == signal.SIGINT:
        os.write(2, f"{MESSAGE}\n".encode())
    os._exit(128 + number)


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What sys.excepthook does; exit code 1 follows. An error of kbit's own is a bug, with a traceback."""
    package = ((isinstance(error, ImportError) and error.name) or "kbit").partition(".")[0]
    if package == "kbit" or "--debug" in sys.argv or os.environ.get("KBIT_DEBUG"):
        sys.__excepthook__(kind, error, trace)
    elif isinstance(error, ModuleNotFoundError):
        print(f"error: {error}, which kbit needs. Install it: pip install {package}", file=sys.stderr)
    else:
        remedy = f"Install it again: pip install --force-reinstall {package}"
        print(f"error: {package} does not work: {error}. {remedy}", file=sys.stderr)


def imported() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that commands clean up, and errors reach them."""
    if sys.excepthook is _say:
        sys.excepthook = sys.__excepthook__
    if signal.getsignal(signal.SIGINT) == leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if is_command():
    sys.excepthook = _say
    # Whoever starts a command in the background may have it ignore the signal.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        with suppress(ValueError):  # no main thread
            signal.signal(signal.SIGINT, leave)
