"""`kbit bench serve` without a server: an untimed round of each level comes before its timed requests."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kbit.bench import serve as bench


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts that arrive, in their order; those with an odd client and the last number fail."""
    sent: list[str] = []
    lock = threading.Lock()

    def chat(port: int, model: str, prompt: str, new_tokens: int, timeout: float) -> dict[str, Any]:
        with lock:
            sent.append(prompt)
        if prompt.startswith("2 1 3 "):
            raise RuntimeError("HTTP 500")
        return {"usage": {"completion_tokens": new_tokens}}

    monkeypatch.setattr(bench, "chat", chat)
    monkeypatch.setattr(bench, "_memory", lambda pid: (1, 2))
    return sent


def test_every_level_has_an_untimed_round(prompts: list[str]) -> None:
    plan = bench.Plan(clients=(1, 2), requests=3, prompt_words=4, new_tokens=5)
    assert vars(plan)["warm_up"] == 1
    first, second = bench.load(1, 2, "model", plan)
    assert prompts[:2] == ["warm up", "1 0 3 0"]
    assert sorted(prompts[5:7]) == ["2 0 3 0", "2 1 3 0"]
    assert len(set(prompts)) == len(prompts) == 1 + 4 * (1 + 2)  # no two are the same, for no cache to help
    for level in (first, second):
        assert len(level.latencies) == level.requests == 3 * level.clients
        assert level.tokens == 5 * level.requests
        assert (level.resident_bytes, level.device_bytes) == (1, 2)
    assert (first.errors, second.errors) == ([], ["RuntimeError: HTTP 500"])


def test_a_plan_can_do_without(prompts: list[str]) -> None:
    plan = bench.Plan(clients=(2,), requests=1, prompt_words=4, warm_up=0)
    (level,) = bench.load(1, 2, "model", plan)
    assert sorted(prompts[1:]) == ["2 0 0 0", "2 1 0 0"]
    assert len(level.latencies) == 2
