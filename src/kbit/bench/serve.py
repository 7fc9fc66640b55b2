"""`kbit bench serve`: a bounded load test of a served model, over its OpenAI-compatible API on loopback.

The server is `transformers serve` in a process of its own. Clients are threads of this one: each sends its
requests one after the other, the next as soon as the last is answered, so `clients` requests are under way at
any time. Every request asks for the same number of tokens, greedily, and differs from all others, so that no
cache helps.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kbit.bench import child
from kbit.bench.ports import free_port

# Started by name, for the command line stands above this layer.
SERVER = ("kbit", "serve")
_LOG_LINES = 30
_STOP_SECONDS = 30  # more than the server gives itself for answers under way


@dataclass(frozen=True)
class Plan:
    """A load test.

    Attributes:
        clients: numbers of clients, one level of load each.
        requests: of each client at each level.
        prompt_words, new_tokens: of each request.
        timeout: seconds that one request may take before it counts as an error.
        warm_up: requests of each client before those at each level, untimed. At a new number of clients the
            first ones record CUDA graphs, and took up to three times as long as the later ones.
    """

    clients: Sequence[int] = (1, 8, 32)
    requests: int = 4
    prompt_words: int = 64
    new_tokens: int = 64
    timeout: float = 300.0
    warm_up: int = 1


@dataclass
class Level:
    """What one level of load gave. Latencies are of whole answers, in seconds; memory is after the level.

    `errors` are those of the untimed requests, too.
    """

    clients: int
    requests: int
    seconds: float = 0.0
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    resident_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all clients together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def percentile(self, percent: int) -> float:
        """Latency that so many percent of answers did not exceed; nan without answers."""
        if len(self.latencies) < 2:
            return self.latencies[0] if self.latencies else float("nan")
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[percent - 1]


@contextlib.contextmanager
def server(
    model: Path, options: Sequence[str] = (), start_timeout: float = 600.0
) -> Iterator[tuple[int, int]]:
    """Serve a model on loopback; stopped at the end, whatever happens.

    Args:
        model: its folder, quantized or not, with a tokenizer that has a chat template.
        options: of `transformers serve`, such as ("--continuous-batching",).
        start_timeout: seconds until it must answer; kernels may be compiled meanwhile.

    Yields:
        (port, process id).

    Raises:
        RuntimeError: it ended, or did not answer in time; the message ends with what it said.
    """
    port = free_port()
    place = ("--host", "127.0.0.1", "--port", str(port))
    process = child.start(
        *(*SERVER, str(model), *place, *options),
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log: list[str] = []
    reader = threading.Thread(target=_keep, args=(process.stdout, log), daemon=True)
    reader.start()
    try:
        _wait(process, port, start_timeout, log)
        yield port, process.pid
    finally:
        _stop(process)


def _keep(stream: TextIO | None, log: list[str]) -> None:
    """Read what a process prints, so that it never waits for a reader, and keep the end of it."""
    for line in stream or ():
        log.append(line.rstrip())
        del log[:-_LOG_LINES]


def _wait(process: subprocess.Popen[str], port: int, seconds: float, log: list[str]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            time.sleep(0.2)  # for the reader to catch up
            raise RuntimeError(f"the server ended with code {process.returncode}:\n" + "\n".join(log))
        with contextlib.suppress(OSError, http.client.HTTPException):
            if _request(port, "GET", "/health", None, 5.0)[0] == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not answer within {seconds:.0f} s:\n" + "\n".join(log))


def _stop(process: subprocess.Popen[str]) -> None:
    for how in (signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)  # its own session: none of this process's group
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
            return


def _request(port: int, method: str, path: str, body: Any, timeout: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def chat(port: int, model: str, prompt: str, new_tokens: int, timeout: float = 300.0) -> dict[str, Any]:
    """One chat completion, greedy.

    Returns:
        The response as the API gives it.

    Raises:
        RuntimeError: the server answered with an error.
        OSError: it did not answer in time.
    """
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": new_tokens}
    status, answer = _request(port, "POST", "/v1/chat/completions", body | {"temperature": 0}, timeout)
    if status != 200:
        raise RuntimeError(f"HTTP {status}: {answer[:200].decode(errors='replace')}")
    return json.loads(answer)


def load(port: int, pid: int, model: str, plan: Plan) -> Iterator[Level]:
    """Put every level of load on a server, warmed up before it; yields each as it is done."""
    chat(port, model, "warm up", plan.new_tokens, plan.timeout)  # raises where the server cannot answer
    for clients in plan.clients:
        untimed = Level(clients, clients * plan.warm_up)
        _send(untimed, port, model, plan, range(plan.requests, plan.requests + plan.warm_up))
        level = Level(clients, clients * plan.requests, errors=untimed.errors)
        _send(level, port, model, plan, range(plan.requests))
        level.resident_bytes, level.device_bytes = _memory(pid)
        yield level


def _send(level: Level, port: int, model: str, plan: Plan, requests: Sequence[int]) -> None:
    """Have every client of a level send these requests, by their numbers, and note what came of it."""
    clients, lock = level.clients, threading.Lock()

    def client(number: int) -> None:
        for request in requests:
            words = " ".join(f"{clients} {number} {request} {word}" for word in range(plan.prompt_words // 4))
            start = time.perf_counter()
            try:
                answer = chat(port, model, words, plan.new_tokens, plan.timeout)
                tokens = int(answer["usage"]["completion_tokens"])
            except (OSError, RuntimeError, KeyError, ValueError, http.client.HTTPException) as error:
                with lock:
                    level.errors.append(f"{type(error).__name__}: {error}")
                continue
            with lock:
                level.latencies.append(time.perf_counter() - start)
                level.tokens += tokens

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    level.seconds = time.perf_counter() - start


def _memory(pid: int) -> tuple[int | None, int | None]:
    """(resident bytes of a process and its children, bytes in use on the first GPU by anybody)."""
    import psutil
    import torch

    try:
        server = psutil.Process(pid)
        family = [server, *server.children(recursive=True)]
        resident = sum(process.memory_info().rss for process in family)
    except psutil.Error:
        resident = None
    if not torch.cuda.is_available():
        return resident, None
    free, total = torch.cuda.mem_get_info(0)
    return resident, total - free


def as_json(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """The levels as JSON values, with the figures that a table shows."""
    return [
        asdict(level)
        | {
            "tokens_per_second": level.tokens_per_second,
            "p50_s": level.percentile(50) if level.latencies else None,  # JSON has no nan
            "p95_s": level.percentile(95) if level.latencies else None,
        }
        for level in levels
    ]
