"""Processes that begin with their imports done: forked from one that imported torch, transformers and kbit.

For tests that start many: importing takes most of such a process. `command` is what to start in the place of
`python ...`; it goes like one that imports, with exit code, signals and all, but for the environment that
imports look at, and the memory of the process that has its number.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# What commands, servers and examples import at some time.
IMPORTS = (
    "kbit.cli",
    "accelerate",
    "torch.distributed.tensor",
    "transformers.cli.serve",
    "transformers.generation.continuous_batching",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


def command(*words: object) -> list[str]:
    """The command line for `python words...`, of a module (`-m name`) or a script."""
    arguments = [os.fspath(word) if isinstance(word, Path) else str(word) for word in words]
    if not hasattr(os, "pidfd_open"):
        return [sys.executable, *arguments]
    client = str(Path(__file__).with_name("warm_client.py"))
    return [sys.executable, "-I", "-S", client, _address(), *arguments]


@functools.cache
def _address() -> str:
    """Where this process's template listens; it ends with this process."""
    folder = tempfile.TemporaryDirectory()
    address = f"{folder.name}/socket"
    program = [sys.executable, __file__, address]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    template = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def end() -> None:
        template.stdin.close()  # type: ignore[union-attr]
        template.wait()
        folder.cleanup()

    atexit.register(end)
    assert template.stdout.readline(), "the template of warm processes could not start"  # type: ignore[union-attr]
    return address


def _receive(client: socket.socket) -> tuple[dict, list[int]]:
    data, files, *_ = socket.recv_fds(client, 1 << 16, 3)
    while not data.endswith(b"\n"):
        more = client.recv(1 << 16)
        if not more:  # the client was killed
            os._exit(1)
        data += more
    return json.loads(data), list(files)


def _watch(child: int, client: socket.socket) -> None:
    """Pass a client's signals on to its process, and tell it how that ended. Without client it is killed."""
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            break
        numbers = client.recv(64) or bytes([signal.SIGKILL])
        for number in numbers:
            os.kill(child, number)
        if signal.SIGKILL in numbers:
            break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(code.to_bytes(4, "little", signed=True))


def _wait_for_work(listener: socket.socket) -> Sequence[str]:
    """Fork for each client; returns in its process, with what to run there."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked, files = _receive(client)
        if child := os.fork():
            for file in files:
                os.close(file)
            _watch(child, client)
            os._exit(0)
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for number in asked["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        return asked["words"]


def _run(words: Sequence[str]) -> None:
    """As Python runs a command line."""
    if words[0] == "-m":
        sys.argv, sys.path[0] = list(words[1:]), os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    for name in IMPORTS:
        __import__(name)
    gc.collect()
    gc.freeze()  # or collections of the processes would copy what they share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that nobody has to wait for watchers
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(sys.argv[1])
        listening.listen()
        print("ready", flush=True)
        given = _wait_for_work(listening)
    _run(given)
