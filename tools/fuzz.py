"""Run random problems by every kernel that may take them, and compare whole results with what they should be.

    python tools/fuzz.py benchmarks/results/fuzz.json --seconds 300

What fits no test's list of shapes. Products (`fuzz_products.py`), against float64: any N and K, rows by the
thousand or none, experts dealt in every way, widths, codebooks, biases, gates, rows apart in memory, NVFP4 in
its layouts and contracts; half of the k-bit ones have one-hot activations, whose products are decoded weights
to the bit. What stands around them (`fuzz_around.py`), against the definitions in PyTorch: attention, linear
attention, norms, routing, formats. Each is repeated and compared. A cache of compiled kernels
(`kbit compile`) leaves more time to problems.

A problem that takes longer than a minute is a kernel that waits without an end: it is printed, and the run
ends with 2; it ends with 1 if a result was wrong. `--seed` and `--only` repeat a problem that was printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

import fuzz_around
import fuzz_products
import torch
from fuzz_checks import Watchdog, wrong

from kbit.bench.gpu_timing import describe

# Whose problem a seed is, by its remainder.
TURNS = (fuzz_products.problem, fuzz_products.problem, fuzz_products.problem, fuzz_around.problem)


def fuzz(seeds: range, seconds: float, device: torch.device) -> tuple[Counter[str], list[str]]:
    """Problems checked of each kernel or op, and what was wrong."""
    done, found, end = Counter[str](), list[str](), time.monotonic() + seconds
    with Watchdog() as watchdog:
        for seed in seeds:
            if time.monotonic() > end:
                break
            watchdog.now(f"operands of seed {seed}")
            problem, ways = TURNS[seed % len(TURNS)](seed, device)
            for way, run, wants in ways:
                watchdog.now(f"{way}: {problem}")
                try:
                    words = wrong(run, wants)
                except ValueError as error:
                    if "KBIT_KERNEL" not in str(error):
                        raise
                    continue  # the kernel may not take it
                done[way] += 1
                if words:
                    found.append(f"{way}: {words}: {problem}")
                    print("WRONG", found[-1], flush=True)
    return done, found


def main() -> int:
    """Run problems for some time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="JSON for the counts")
    parser.add_argument("--seconds", type=float, default=300, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; others count up from it")
    parser.add_argument("--only", action="store_true", help="only the problem of this seed")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + (1 if given.only else 2**31))
    done, found = fuzz(seeds, given.seconds, torch.device(given.device))
    for way, count in done.items():
        print(f"{count:7} {way}")
    print(f"{done.total():7} problems, {len(found)} of them wrong")
    if given.file is not None:
        result = {"machine": describe(given.device), "seed": given.seed, "done": done, "wrong": found}
        given.file.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
