"""`kbit bench model --gpus N`: the arms of a model that is split over the GPUs of one machine.

Every rank is a process of its own, `python -m kbit.bench.model_ranks JOB`, and runs `kbit.bench.model` on its
part. The ranks of an arm end with it: a communicator that a CUDA graph has recorded cannot be taken down
safely while the graph is there.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kbit.bench import child, model_build, model_split
from kbit.bench import model as bench
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.collectives import NCCL, ONE_SHOT, groups_of, use_one_shot

_LOG_LINES = 40
_POLL_S = 0.05
# One line of JSON for each arm.
_RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Job:
    """What the ranks measure.

    Attributes:
        model, layers: as in `model_build.load_config`.
        plan: see `bench.Plan`; its dtype is bfloat16.
        policies: {arm: policy, or None for 16 bits}.
        device: "cuda" or "cpu".
        by_expert: split experts by id, not every expert.
        all_reduce: one of `collectives.ALL_REDUCES`; "nccl" means the process group's own, on a CPU too.
            None: as loading has it.
        timeout_s: until the ranks must be done.
    """

    model: str
    layers: int | None
    plan: bench.Plan
    policies: dict[str, QuantizationPolicy | None]
    device: str = "cuda"
    by_expert: bool = False
    all_reduce: str | None = None
    timeout_s: float = 600.0

    def to_json(self) -> str:
        """This job as text, for `from_json` in another process."""
        plan = {key: value for key, value in asdict(self.plan).items() if key != "dtype"}
        policies = {name: policy and policy.to_dict() for name, policy in self.policies.items()}
        return json.dumps(vars(self) | {"plan": plan, "policies": policies})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """What `to_json` wrote."""
        values = json.loads(text)
        policies = {
            name: policy and QuantizationPolicy.from_dict(policy)
            for name, policy in values["policies"].items()
        }
        return cls(**values | {"plan": bench.Plan(**values["plan"]), "policies": policies})


def check(device: str, ranks: int) -> None:
    """Raises ValueError where there are fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if device == "cuda" and count < ranks:
        raise ValueError(f"--gpus {ranks}: torch sees {count} GPUs. Ask for fewer.")


def measure(job: Job, ranks: int) -> Iterator[bench.ArmResult]:
    """Start the ranks, wait for them, and yield what the first one measured: before a failure, too.

    Raises:
        RuntimeError: a rank failed, or they were not done in time; the message ends with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="kbit-ranks-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.to_json())
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, environment in enumerate(model_split.rank_environment(ranks)):
                with (folder / f"{rank}.log").open("w") as log:
                    processes.append(
                        child.start(__spec__.name, name, env=environment, stdout=log, stderr=log)
                    )
            _wait(processes, job.timeout_s, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            yield from _found(folder)


def _found(folder: Path) -> Iterator[bench.ArmResult]:
    """What the first rank has measured so far."""
    file = folder / _RESULTS
    for line in file.read_text().splitlines(keepends=True) if file.is_file() else ():
        if not line.endswith("\n"):
            return  # killed while it wrote
        values = json.loads(line)
        rows = [bench.DecodeRow(**row) for row in values.pop("decode")]
        yield bench.ArmResult(**values, decode=rows)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        late = time.monotonic() > deadline
        if failed is None and None not in codes:
            return
        if failed is not None or late:
            rank = failed if failed is not None else codes.index(None)
            what = f"was not done after {seconds:.0f} s" if failed is None else f"failed ({codes[rank]})"
            lines = (folder / f"{rank}.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
            raise RuntimeError(f"rank {rank} of {len(processes)} {what}:\n" + "\n".join(lines))
        time.sleep(_POLL_S)


def _progress(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)


def _start(job: Job) -> torch.device:
    """Join the process group; this rank's device."""
    limit = datetime.timedelta(seconds=job.timeout_s)
    if job.device != "cuda":
        dist.init_process_group("gloo", timeout=limit)
        return torch.device(job.device)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    # With a device, communicators are made at once, and not by the first collective.
    dist.init_process_group("nccl", timeout=limit, device_id=device)
    return device


def _run(job: Job) -> Iterator[bench.ArmResult]:
    device, ranks = _start(job), dist.get_world_size()
    _progress(f"{ranks} ranks have met")
    config = model_build.load_config(job.model, job.layers)
    way = job.all_reduce or _usual_way(job.plan.dtype, device)
    builder = functools.partial(_build, one_shot=way == ONE_SHOT, by_expert=job.by_expert)
    for arm, policy in job.policies.items():
        # In 16 bits transformers' own layers add up, by the process group.
        name = arm + (f"{bench.ALL_REDUCE}{way}" if policy and way != NCCL else "")
        try:
            yield from bench.measure(config, job.plan, device, {name: policy}, _progress, builder, ranks)
        except _NoOneShotError as error:
            yield bench.ArmResult(name, absent=str(error), gpus=ranks)


def _usual_way(dtype: torch.dtype, device: torch.device) -> str:
    """How the ranks of a model that was loaded add up."""
    reason = use_one_shot(dist.group.WORLD, dtype, device)
    if reason is not None:
        _progress(f"sums are left to {dist.get_backend()}: {reason}")
    return ONE_SHOT if reason is None else NCCL


class _NoOneShotError(Exception):
    """One-shot all-reduces cannot be; raised on all ranks."""


def _build(
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    policy: QuantizationPolicy | None,
    one_shot: bool,
    by_expert: bool,
) -> model_build.Built:
    built = model_split.build(config, device, dtype, policy, by_expert)
    if one_shot and policy is not None:
        for group in groups_of(built.model):
            reason = use_one_shot(group, dtype, device)
            if reason is not None:
                raise _NoOneShotError(reason)
    return built


def main() -> None:
    """One rank."""
    folder = Path(sys.argv[1])
    job = Job.from_json((folder / "job.json").read_text())
    for result in _run(job):
        if dist.get_rank() == 0:
            with (folder / _RESULTS).open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    dist.barrier()
    # Taking NCCL down waits for CUDA graphs that Python may still hold; the process ends with everything.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
