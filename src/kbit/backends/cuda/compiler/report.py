"""What ptxas says about a kernel: registers, spills, stack and shared memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

PROPERTIES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Report:
    """Resources of one kernel.

    Attributes:
        registers: per thread; 0 where the log does not say.
        spill_bytes: stored plus loaded, per thread.
        stack_bytes: local memory per thread; an array indexed at run time is there.
        shared_bytes: static shared memory per block.
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def parse(log: str) -> Report:
    """Read the output of `ptxas -v` for a file with one kernel; functions that it calls count into it."""
    functions = [tuple(map(int, match)) for match in PROPERTIES.findall(log)]
    return Report(
        registers=max(map(int, USED.findall(log)), default=0),
        spill_bytes=sum(stores + loads for _, stores, loads in functions),
        stack_bytes=sum(stack for stack, _, _ in functions),
        shared_bytes=max(map(int, SHARED.findall(log)), default=0),
    )
