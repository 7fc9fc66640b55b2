"""Servers in processes of their own, for tests that stop them."""

from __future__ import annotations

import contextlib
import functools
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import warm_processes
from kbit.bench import serve as bench
from kbit.bench.ports import free_port

# A cache of 64 blocks of 16 tokens; by default it takes most of the memory there is.
BATCHED = ["--continuous-batching", "--cb-block-size=16", "--cb-num-blocks=64"]


@contextlib.contextmanager
def own_process(
    folder: Path, options: Sequence[str], hangup: signal.Handlers = signal.SIG_DFL
) -> Iterator[tuple[subprocess.Popen, int]]:
    """A server's process, and its port; it has answered once, which starts the batching.

    `hangup` is what it begins with for SIGHUP, whatever these tests were started by; nohup has it ignored.
    """
    port = free_port()
    place = ("--device", "cpu", "--host", "127.0.0.1", "--port", port)
    process = subprocess.Popen(
        warm_processes.command("-m", "kbit", "serve", folder, *place, *options),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=functools.partial(signal.signal, signal.SIGHUP, hangup),
    )
    try:
        bench._wait(process, port, 120.0, [])
        bench.chat(port, str(folder), "w1", 2)
        yield process, port
    finally:
        process.kill()
