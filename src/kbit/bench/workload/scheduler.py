"""Continuous batching, simulated: which numbers of tokens M a model's layers see.

Each iteration decodes one token for every user who has an answer under way, then adds one chunk of the oldest
waiting prompt as far as the token budget allows, and runs the model once on all of them. This is how vLLM
schedules with chunked prefill. The last chunk of a prompt yields the answer's first token; a user whose
answer is complete asks again at once, so the engine is always full; earlier turns are cached.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kbit.bench.workload.distributions import Lengths, Traffic, Turn

# Documented analyses of this kind prefill 512 tokens at a time; 2048 is vLLM's usual limit of an iteration.
DEFAULT_CHUNK, DEFAULT_BUDGET = 512, 2048


class Step(NamedTuple):
    """What one iteration computes: `decode` users' next tokens and `prefill` tokens of a prompt."""

    decode: int
    prefill: int

    @property
    def tokens(self) -> int:
        """M of every linear layer."""
        return self.decode + self.prefill


@dataclass(frozen=True)
class Limits:
    """Tokens of a prompt in one iteration at most (`chunk`), and of everything (`budget`)."""

    chunk: int = DEFAULT_CHUNK
    budget: int = DEFAULT_BUDGET

    def check(self, users: int) -> None:
        """Raises ValueError where prompts would never get a turn beside `users` who decode."""
        if users < 1 or self.chunk < 1:
            raise ValueError(f"workload: users and chunk must be at least 1, got {users} and {self.chunk}.")
        if self.budget < users:
            raise ValueError(
                f"workload: a budget of {self.budget} tokens leaves no room for a prompt beside "
                f"{users - 1} users who decode. Give --budget of at least {users}."
            )


DEFAULT_LIMITS = Limits()


@dataclass
class Served:
    """Iterations by what they compute, and what was left undone when the turns ran out."""

    steps: Counter[Step] = field(default_factory=Counter)

    @property
    def iterations(self) -> int:
        """How often the model ran."""
        return self.steps.total()


def serve(turns: Sequence[Turn], users: int, limits: Limits = DEFAULT_LIMITS) -> Served:
    """Serve turns in order to `users` at once, until one of them would have no next turn.

    So every iteration has all users, and the idle end of the list is no part of the result. A turn of p and g
    tokens takes p tokens of prefill and g - 1 steps of decoding.

    Args:
        turns: at least as many as users.
        users: how many are served at once, >= 1.
        limits: tokens of an iteration.

    Raises:
        ValueError: too few turns, or limits under which prompts starve.
    """
    limits.check(users)
    if len(turns) < users:
        raise ValueError(f"workload: {users} users need at least as many turns, got {len(turns)}.")
    return _Engine(turns, users, limits).run()


class _Engine:
    """State of a simulation. A decoding user is the iteration in which the answer ends, on a heap."""

    def __init__(self, turns: Sequence[Turn], users: int, limits: Limits):
        self.limits = limits
        self.coming: Iterator[Turn] = iter(turns)
        self.waiting: deque[tuple[int, Turn]] = deque()  # (prompt tokens left, turn), oldest first
        self.ends: list[int] = []
        self.now = 0  # iterations done
        self.result = Served()
        for _ in range(users):
            self.ask()

    def ask(self) -> bool:
        turn = next(self.coming, None)
        if turn is not None:
            self.waiting.append((turn.prompt, turn))
        return turn is not None

    def run(self) -> Served:
        going = True
        while going:
            answered = self.prefill() if self.waiting else self.decode()
            while self.ends and self.ends[0] <= self.now:
                heapq.heappop(self.ends)
                answered += 1
            # Whoever is answered asks again; the first who cannot ends the simulation.
            going = all(self.ask() for _ in range(answered))
        return self.result

    def decode(self) -> int:
        """All iterations up to the next end of an answer; nobody is answered before."""
        count = self.ends[0] - self.now
        self.result.steps[Step(len(self.ends), 0)] += count
        self.now += count
        return 0

    def prefill(self) -> int:
        """One iteration with a chunk of the oldest prompt; 1 if that completes an answer of one token."""
        left, turn = self.waiting.popleft()
        decoding = len(self.ends)
        tokens = min(left, self.limits.chunk, self.limits.budget - decoding)
        self.result.steps[Step(decoding, tokens)] += 1
        self.now += 1
        if tokens < left:
            self.waiting.appendleft((left - tokens, turn))
        elif turn.answer == 1:
            return 1
        else:
            heapq.heappush(self.ends, self.now + turn.answer - 1)
        return 0


def alone(traffic: Traffic, budget: int = DEFAULT_BUDGET) -> dict[Step, float]:
    """Expected iterations of one turn of a single user: no simulation, an exact sum over the distribution.

    The prompt is prefilled at once, in pieces of `budget` tokens where it is longer; then answer - 1 steps
    decode one token each.
    """
    steps: dict[Step, float] = {}
    for size, count in _pieces(traffic.prompts, budget):
        steps[Step(0, size)] = steps.get(Step(0, size), 0.0) + count
    decoding = traffic.answers.mean - 1
    if decoding > 0:
        steps[Step(1, 0)] = decoding
    return steps


def _pieces(prompts: Lengths, budget: int) -> Iterator[tuple[int, float]]:
    """(size, expected number) of the pieces that prompts are cut into."""
    for length, frequency in prompts.frequencies.items():
        whole, rest = divmod(length, budget)
        if whole:
            yield budget, whole * frequency
        if rest:
            yield rest, frequency


def by_tokens(steps: Mapping[Step, float]) -> dict[int, float]:
    """{M: iterations}, ascending."""
    result: dict[int, float] = {}
    for step, count in steps.items():
        result[step.tokens] = result.get(step.tokens, 0.0) + count
    return dict(sorted(result.items()))
