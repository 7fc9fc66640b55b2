"""Ports of loopback for processes that are about to start."""

from __future__ import annotations

import contextlib
import secrets
import socket

_PORTS = range(10_240, 32_768)


def free_port() -> int:
    """A port of loopback that nobody has, below those that systems give to connections by themselves.

    A process that takes some seconds to start finds it free still.

    Raises:
        OSError: there is none.
    """
    for _ in range(100):
        port = secrets.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of loopback is free")
