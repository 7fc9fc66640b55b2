"""How long prompts and answers are: frequencies per length, or a log of requests."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kbit.bench.result_files import read_text
from kbit.format.strict_json import parse_json

PROMPT_KEY, ANSWER_KEY = "input_tokens_per_turn", "generated_tokens_per_turn"
LOG_KEYS = ("input_tokens", "generated_tokens")
LOG_SUFFIX = ".jsonl"
# Rounded frequencies may miss 1 by this much; more is a wrong file.
SUM_TOLERANCE = 0.01
_FORMAT = (
    f'Format: {{"{PROMPT_KEY}": {{"freq": {{"16": 0.4, "512": 0.6}}}}, "{ANSWER_KEY}": {{"freq": ...}}}}, '
    f"or a {LOG_SUFFIX} log with one "
    f'{{"{LOG_KEYS[0]}": 500, "{LOG_KEYS[1]}": 80}} a line.'
)


@dataclass(frozen=True)
class Turn:
    """One request: tokens of its prompt that no cache holds, and tokens it gets as an answer; both >= 1."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Lengths:
    """Token counts and how frequent each is; frequencies sum to 1."""

    frequencies: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Tokens on average."""
        return math.fsum(length * frequency for length, frequency in self.frequencies.items())


@dataclass(frozen=True)
class Traffic:
    """What is asked of a model. With a log, prompts keep their answers; without, the two are independent."""

    about: str
    prompts: Lengths
    answers: Lengths
    log: tuple[Turn, ...] = ()

    def turns(self, count: int, seed: int) -> list[Turn]:
        """Draw turns; the same ones for the same seed, on every machine."""
        draw = random.Random(seed)
        if self.log:
            return draw.choices(self.log, k=count)
        prompts, answers = (
            draw.choices(list(lengths.frequencies), list(lengths.frequencies.values()), k=count)
            for lengths in (self.prompts, self.answers)
        )
        return [Turn(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def load(path: Path | None = None) -> Traffic:
    """Read a distribution (JSON) or a log of requests (JSONL); the shipped distribution without a path.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is neither, or holds counts below 1 or frequencies that do not sum to 1.
    """
    if path is None:
        shipped = resources.files("kbit") / "data" / "token_distributions.json"
        return _distribution(json.loads(shipped.read_text(encoding="utf-8")), "the shipped distribution")
    text = read_text(path, f"workload: {path}", _FORMAT)
    if path.suffix == LOG_SUFFIX:
        return from_log(list(_log_turns(text, path)), str(path))
    try:
        data = parse_json(text.encode(), not_finite=True)  # whose field is named later
    except ValueError as error:
        raise ValueError(f"workload: {path} is not JSON ({error}). {_FORMAT}") from None
    return _distribution(data, str(path))


def from_log(turns: list[Turn], about: str) -> Traffic:
    """Traffic that repeats the turns of a log.

    Raises:
        ValueError: the log is empty.
    """
    if not turns:
        raise ValueError(f"workload: {about} holds no request. {_FORMAT}")
    prompts, answers = (
        Lengths({length: count / len(turns) for length, count in sorted(Counter(lengths).items())})
        for lengths in ([turn.prompt for turn in turns], [turn.answer for turn in turns])
    )
    return Traffic(f"{len(turns)} requests of {about}", prompts, answers, tuple(turns))


def _log_turns(text: str, path: Path) -> Iterator[Turn]:
    # Other ends of lines that Unicode has are within prompts.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line.encode())
            counts = [entry[key] for key in LOG_KEYS]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"workload: line {number} of {path} is no request ({type(error).__name__}: {error}). "
                + _FORMAT
            ) from None
        if not all(type(count) is int and count >= 1 for count in counts):
            raise ValueError(
                f"workload: line {number} of {path} has {dict(zip(LOG_KEYS, counts, strict=True))}; both "
                "must be whole numbers of at least 1. Leave empty turns out."
            )
        yield Turn(*counts)


def _distribution(data: Any, about: str) -> Traffic:
    prompts, answers = (_lengths(data, key, about) for key in (PROMPT_KEY, ANSWER_KEY))
    description = data.get("description")
    return Traffic(description if isinstance(description, str) else about, prompts, answers)


def _lengths(data: Any, key: str, about: str) -> Lengths:
    try:
        pairs = [(int(length), float(frequency)) for length, frequency in data[key]["freq"].items()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"workload: {about} has no frequencies under {key} ({type(error).__name__}: {error}). {_FORMAT}"
        ) from None
    wrong = [pair for pair in pairs if pair[0] < 1 or not 0 <= pair[1] < math.inf]
    if wrong:
        raise ValueError(
            f"workload: {key} of {about} has length {wrong[0][0]} with frequency {wrong[0][1]}; lengths must "
            "be at least 1 and frequencies finite and not negative."
        )
    total = math.fsum(frequency for _, frequency in pairs)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(
            f"workload: the frequencies of {key} of {about} sum to {total:.4g}, they must sum to 1. "
            "Divide counts by their sum."
        )
    merged: dict[int, float] = {}
    for length, frequency in sorted(pairs):
        if frequency:
            merged[length] = merged.get(length, 0.0) + frequency / total
    return Lengths(merged)
