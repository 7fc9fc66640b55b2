"""Processes that end with the one that started them, even where that one is killed.

`python -m kbit.bench.child MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS` for as long as somebody holds
the other end of its standard input. When a process is gone, however that came about, it holds nothing.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading
from typing import Any


def start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start `python -m MODULE ARGUMENTS`.

    Args:
        module, arguments: what is run.
        options: of Popen, without stdin.
    """
    command = [sys.executable, "-m", __spec__.name, module, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **options)


def _end_with_parent() -> None:
    while os.read(0, 1024):  # nobody writes; it is empty when nobody is left who could
        pass
    os._exit(1)


def main() -> None:
    """Run a module, and watch the standard input meanwhile."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
