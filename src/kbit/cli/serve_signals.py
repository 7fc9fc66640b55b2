"""How a server's process ends: the first signal lets answers end, a second one does not wait for them."""

from __future__ import annotations

import functools
import signal
import time
from typing import Any

from kbit import _startup

_ENDING = (signal.SIGINT, signal.SIGTERM)
# One signal may arrive twice: `timeout` sends it to its command, and to the group that the command is in.
_TWICE_SECONDS = 0.5


def end_by_signals() -> None:
    """Have uvicorn, and what comes after it, end as other commands of kbit do."""
    # uvicorn, once it has shut down, raises the signal again that stopped it. As KeyboardInterrupt it would
    # end in transformers' command line: "Aborted!" and exit code 1. And the thread that computes may be in
    # the middle of an answer that a second signal did not wait for: Python's own way out would abort there.
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _startup.leave)
    _finish_answers_at_hangup()
    _leave_at_second_signal()


def _finish_answers_at_hangup() -> None:
    """Have uvicorn shut down for a closed terminal as for SIGTERM, unless it is ignored, as nohup has it.

    It does not take this signal over, whose handler would leave by an exception inside of its event loop.
    """
    from uvicorn import server

    module: Any = server
    number = getattr(signal, "SIGHUP", None)  # Windows has none
    handled = module.HANDLED_SIGNALS
    if number is not None and number not in handled and signal.getsignal(number) != signal.SIG_IGN:
        module.HANDLED_SIGNALS = (*handled, number)


def _leave_at_second_signal() -> None:
    """Have the handler itself end the process: uvicorn's only tells the event loop, which may be stuck."""
    from uvicorn.server import Server

    kind: Any = Server
    handle, times = kind.handle_exit, list[float]()

    @functools.wraps(handle)
    def handled(self: Any, number: int, frame: Any) -> None:
        times.append(time.monotonic())
        if number in _ENDING and times[-1] - times[0] > _TWICE_SECONDS:
            _startup.leave(number, frame)
        handle(self, number, frame)

    kind.handle_exit = handled
