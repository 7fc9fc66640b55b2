"""Several threads that take tasks from one queue, each with a device of its own.

Threads and not processes: reading, quantizing and writing all leave Python's lock, and a GPU has one context.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kbit.integrations.devices import find_device

# task(device, stopped): `stopped()` tells a long task that another one has failed, and that it may leave.
Task = Callable[[torch.device, Callable[[], bool]], object]


def worker_devices(devices: Sequence[str], jobs: int | None) -> list[torch.device]:
    """A device for every worker.

    Args:
        devices: such as ["cpu"], or ["cuda:0", "cuda:1"]; workers take them in turn.
        jobs: how many workers; by default one on a CPU, whose kernels use all threads, and two for each GPU,
            so that one reads and writes while the other computes.

    Raises:
        ValueError: a device is not known or not there, there is none, or jobs is less than their number.
    """
    known = "cpu, cuda, or a list such as cuda:0,cuda:1"
    if not devices:
        raise ValueError(f"no device to quantize on. Use {known}.")
    found = [find_device(name, known) for name in devices]
    if jobs is None:
        jobs = len(found) * (2 if found[0].type == "cuda" else 1)
    if jobs < len(found):
        raise ValueError(
            f"--jobs {jobs} leaves some of {len(found)} devices idle. Name fewer, or use more jobs."
        )
    return [found[index % len(found)] for index in range(jobs)]


def run_all(tasks: Sequence[Task], where: Sequence[torch.device]) -> None:
    """Run every task once; return when all are done.

    Args:
        tasks: taken in order, by whichever worker is free.
        where: a device for every worker.

    Raises:
        Exception: what the first failing task raised, after the others have stopped.
    """
    if len(where) == 1:
        with _placed(where[0]):
            for task in tasks:
                task(where[0], lambda: False)
        return
    _Pool(tasks, where).run()


class _Pool:
    def __init__(self, tasks: Sequence[Task], where: Sequence[torch.device]) -> None:
        self.pending, self.where = deque(tasks), where
        self.stop, self.errors = threading.Event(), list[BaseException]()
        # The threads of torch are shared: more would fight for the cores.
        self.threads_each = max(1, torch.get_num_threads() // len(where))

    def run(self) -> None:
        before = torch.get_num_threads()
        threads = [threading.Thread(target=self._work, args=(device,)) for device in self.where]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # also at a keyboard interrupt, which reaches this thread alone
            self.stop.set()
            for thread in threads:
                thread.join()
            torch.set_num_threads(before)  # what a worker sets, threads that start later get too
        if self.errors:
            raise self.errors[0]

    def _work(self, device: torch.device) -> None:
        torch.set_num_threads(self.threads_each)  # of this thread
        try:
            with _placed(device):
                while not self.stop.is_set():
                    try:
                        task = self.pending.popleft()
                    except IndexError:
                        return
                    task(device, self.stop.is_set)
        except BaseException as error:
            self.errors.append(error)
            self.stop.set()


@contextlib.contextmanager
def _placed(device: torch.device) -> Iterator[Any]:
    """Use a device, and on a GPU a stream of this worker's own."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        yield
