"""Ctrl-C in a `kbit` command that still imports torch: one line and exit code 130, as later on.

kbit/__init__.py imports torch, which takes a second, before anything of the command can run; so it imports
this module first. In other programs that import kbit, Ctrl-C does what it did.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

MESSAGE = "Interrupted."
EXIT_CODE = 130  # 128 + SIGINT


def is_command() -> bool:
    """Whether this process was started as `kbit` or as `python -m kbit`."""
    given = sys.orig_argv[-len(sys.argv) :]
    if sys.argv[:1] == ["-m"]:  # until Python has found the module
        return given[:1] == ["kbit"]
    return given == sys.argv and os.path.basename("".join(given[:1])) in ("kbit", "kbit.exe")


def _leave(number: int, _: object) -> None:
    # Not by an exception, which imports may catch: of 30 interrupts spread over them, 2 had no effect.
    os.write(2, f"{MESSAGE}\n".encode())
    os._exit(EXIT_CODE)


def imported() -> None:
    """Let Ctrl-C raise KeyboardInterrupt from now on, so that commands clean up."""
    if signal.getsignal(signal.SIGINT) == _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Whoever starts a command in the background may have it ignore the signal.
if is_command() and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    with suppress(ValueError):  # no main thread
        signal.signal(signal.SIGINT, _leave)
