"""When the tokens of `model.generate` come."""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any


class TokenTimes:
    """A streamer of transformers that notes the time of every token; seconds since it was made.

    Args:
        streamer: gets everything, too; None for nobody.
    """

    def __init__(self, streamer: Any = None) -> None:
        self._streamer = streamer
        self._start = time.perf_counter()
        self._times: list[float] = []

    def put(self, value: Any) -> None:
        """Take the prompt, the first time, and then token by token."""
        if self._streamer is not None:
            self._streamer.put(value)
        self._times.append(time.perf_counter() - self._start)

    def end(self) -> None:
        """There are no more."""
        if self._streamer is not None:
            self._streamer.end()

    @property
    def tokens(self) -> list[float]:
        """The time of each new token."""
        return self._times[1:]

    @property
    def tokens_s(self) -> float | None:
        """Tokens a second behind the first, by the median of the times between two; None without two."""
        apart = [after - before for before, after in itertools.pairwise(self.tokens)]
        return 1 / statistics.median(apart) if apart else None
