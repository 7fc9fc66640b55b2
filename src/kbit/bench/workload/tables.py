"""The scenario table, what it says in one line, and the JSON of `kbit bench workload`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from rich.table import Table

from kbit.bench.text_table import in_sections, text_table
from kbit.bench.workload.distributions import Traffic
from kbit.bench.workload.scenarios import Analysis, Scenario
from kbit.bench.workload.scheduler import Limits
from kbit.bench.workload.times import INTERPOLATION


@cache
def earlier() -> dict[str, Any]:
    """What the same analysis said of the kernels before these, from `kbit/data/earlier_workload.json`."""
    return json.loads((resources.files("kbit") / "data" / "earlier_workload.json").read_text())


def table(analysis: Analysis) -> Table:
    """One row per number of users and width: share of every kernel, and the speed-up."""
    scenarios = analysis.scenarios
    dtype = scenarios[0].dtype
    kernels = list(dict.fromkeys(kernel for item in scenarios for kernel in item.shares))
    title = f"{analysis.model}: linear layers of a block, us an iteration on average"
    headers = ["users", "k", "mean M", "decode only", *kernels, dtype, "kbit", f"vs {dtype}"]
    result = text_table(title, headers, no_wrap=True)
    for item in in_sections(result, scenarios, lambda item: item.users):
        result.add_row(*_cells(item, kernels))
    return result


def _cells(item: Scenario, kernels: Sequence[str]) -> Iterator[str]:
    yield str(item.users)
    yield str(item.bits)
    yield f"{item.tokens:.1f}"
    yield f"{100 * item.decode_only:.0f}%"
    for kernel in kernels:
        share = item.shares.get(kernel)
        yield f"{100 * share:.0f}%" if share is not None else "-"
    yield f"{item.baseline_us:.1f}"
    yield f"{item.us:.1f}"
    yield f"{item.speedup:.2f}x" if item.speedup >= 1 else f"[red]{item.speedup:.2f}x[/]"


def verdicts(analysis: Analysis) -> Iterator[str]:
    """Per width from how many users on it is slower than 16 bits, beside the earlier kernels' number."""
    before = earlier()
    most = max(item.users for item in analysis.scenarios)
    for bits in sorted({item.bits for item in analysis.scenarios}):
        users = analysis.slower_from(bits)
        now = f"from {users} users on" if users is not None else f"at no number of users up to {most}"
        yield (
            f"{analysis.model}, k={bits}: slower than {analysis.scenarios[0].dtype} {now}; the kernels "
            f"before these: from {before['slower_than_fp16_from_users']} users on ({before['gpu']})"
        )


def as_json(
    source: Mapping[str, Any],
    traffic: Traffic,
    limits: Limits,
    drawn: Mapping[str, int],
    analyses: Sequence[Analysis],
) -> dict[str, Any]:
    """The result file.

    Args:
        source: the kernel table's own header: machine, read_bandwidth_gb_s, ... ; its rows are left out.
        traffic: what was asked.
        limits: of the scheduler.
        drawn: {"turns": ..., "seed": ...}.
        analyses: one per model.
    """
    return {
        "machine": source.get("machine"),
        "grouped_from": source.get("grouped_from"),
        "traffic": {
            "about": traffic.about,
            "mean_prompt_tokens": round(traffic.prompts.mean, 2),
            "mean_answer_tokens": round(traffic.answers.mean, 2),
        },
        "scheduler": asdict(limits) | dict(drawn),
        "interpolation": INTERPOLATION,
        "earlier": earlier(),
        "workload": [
            {
                "model": analysis.model,
                "notes": list(analysis.notes),
                "scenarios": [_scenario(item) for item in analysis.scenarios],
            }
            for analysis in analyses
        ],
    }


def _scenario(item: Scenario) -> dict[str, Any]:
    return {
        "users": item.users,
        "bits": item.bits,
        "dtype": item.dtype,
        "us": round(item.us, 3),
        "baseline_us": round(item.baseline_us, 3),
        "speedup": round(item.speedup, 4),
        "shares": {kernel: round(share, 4) for kernel, share in item.shares.items()},
        "decode_only": round(item.decode_only, 4),
        "mean_tokens": round(item.tokens, 2),
    }
