"""Test and measure everything that needs a GPU, into benchmarks/results/, one process per GPU at a time.

    python tools/measure.py                    # all of it, about half an hour on one H200, on all GPUs there
    python tools/measure.py --only kernels moe --gpus 0
    python tools/measure.py --list

The table of choices comes first, since kernels are measured as it dispatches them. A log of every job is in
build/measure/. An interrupted or failed job leaves what it had finished.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, LOGS = ROOT / "benchmarks" / "results", ROOT / "build" / "measure"
SHIPPED_TABLES = ROOT / "src" / "kbit" / "backends" / "cuda" / "tables"
REPEATS = "--repeats 7"
KERNEL_OPTIONS = f"{REPEATS} --rows 1,2,4,8,16,32,64,128,256,512,576,1024,2048,4096,8192"
DOCUMENTED = "h200"
MODELS = {"8b": "llama-3-8b", "30b": "qwen3-30b-a3b", "coder-next": "qwen3-coder-next"}
POLL_SECONDS = 0.5
NOT_RUN = -1  # in place of an exit code


@dataclass(frozen=True)
class Job:
    """A command; {gpu} in its words stands for the GPU's name, {results} and the like for folders.

    Attributes:
        name: of the log, and in what `--only` names.
        words: after "kbit", or a whole command if the first is "python".
        gpus: that it needs to itself.
        after: jobs whose results it reads.
    """

    name: str
    words: str
    gpus: int = 1
    after: tuple[str, ...] = ()

    def command(self, gpu: str) -> list[str]:
        """What to run."""
        folders = {"results": RESULTS, "tables": SHIPPED_TABLES, "plots": plots_of(gpu)}
        words = self.words.format(gpu=gpu, **folders).split()
        return [sys.executable, *(words[1:] if words[0] == "python" else ["-m", "kbit", *words])]


def plots_of(gpu: str) -> Path:
    """Where pictures go: those of the documentation are of one GPU."""
    return ROOT / "docs" / "plots" if gpu == DOCUMENTED else LOGS / "plots"


def _of_model(kind: str, command: str, short: str, options: str = "") -> Job:
    """A command that takes a model's name, into a result of its kind."""
    name = MODELS[short]
    words = f"{command} {name} {options} --json {{results}}/{{gpu}}-{kind}-{name}.json"
    return Job(f"{short}-{kind}", words, after=("tune",))


# The most important first, and long before short; those that need several GPUs wait for all of them.
JOBS = (
    Job("tune", "tune --fresh --out {tables}/nvidia-{gpu}.json"),
    Job("tests", "python -m pytest -q -m gpu tests"),
    Job("sanitizer", "python tools/sanitize.py {results}/{gpu}-sanitizer.json"),
    Job("fuzz", "python tools/fuzz.py {results}/{gpu}-fuzz.json --seconds 120"),
    # Where there are any, which may take minutes to compile.
    Job(
        "peers",
        f"bench kernels --bits 4 --dtype fp16,bf16 {KERNEL_OPTIONS} --json {{results}}/{{gpu}}-peers.json",
        after=("tune",),
    ),
    Job(
        "kernels",
        f"bench kernels --no-peers --bits 4 --dtype fp16,bf16 {KERNEL_OPTIONS} "
        "--json {results}/{gpu}-kernels.json",
        after=("tune",),
    ),
    Job(
        "mma",  # what other GPUs have for many tokens, on this one
        "bench kernels --no-peers --bits 4 --shape q,kv,down,l8b,sq8k --rows 24,32,64,128,256,512,1024 "
        "--with KBIT_KERNEL=mma --json {results}/{gpu}-mma.json",
    ),
    Job(
        "widths",
        f"bench kernels --no-peers {KERNEL_OPTIONS} --json {{results}}/{{gpu}}-widths.json",
        after=("tune",),
    ),
    Job(
        "coder-next",
        "bench model qwen3-coder-next --profile --json {results}/{gpu}-qwen3-coder-next.json",
        after=("tune",),
    ),
    Job(
        "coder-next-compiled",
        "bench model qwen3-coder-next --compile --batch 1 --prefill 0 --profile "
        "--json {results}/{gpu}-qwen3-coder-next-compiled.json",
        after=("tune",),
    ),
    Job(
        "qwen3.5",
        "bench model qwen3.5-35b-a3b --profile --json {results}/{gpu}-qwen3.5-35b-a3b.json",
        after=("tune",),
    ),
    Job(
        "qwen3.5-head",
        "bench model qwen3.5-35b-a3b --embedding-bits 5 --no-baseline "
        "--json {results}/{gpu}-qwen3.5-35b-a3b-head.json",
        after=("tune",),
    ),
    Job(
        "30b",
        "bench model qwen3-30b-a3b --profile --json {results}/{gpu}-qwen3-30b-a3b.json",
        after=("tune",),
    ),
    Job(
        "30b-compiled",
        "bench model qwen3-30b-a3b --compile --batch 1 --prefill 0 "
        "--json {results}/{gpu}-qwen3-30b-a3b-compiled.json",
        after=("tune",),
    ),
    Job(
        "glm",
        "bench model glm-4.7-flash --profile --json {results}/{gpu}-glm-4.7-flash.json",
        after=("tune",),
    ),
    Job("8b", "bench model llama-3-8b --json {results}/{gpu}-llama-3-8b.json", after=("tune",)),
    Job(
        "8b-head",
        "bench model llama-3-8b --embedding-bits 5 --no-baseline --json {results}/{gpu}-llama-3-8b-head.json",
        after=("tune",),
    ),
    _of_model("generate", "bench generate", "30b", "--compile"),
    _of_model("generate", "bench generate", "8b", "--compile"),
    _of_model("chat", "bench chat", "8b"),
    _of_model("chat", "bench chat", "30b"),
    _of_model("chat", "bench chat", "coder-next", "--no-baseline"),  # one GPU does not hold it in 16 bits
    _of_model("profile", "profile --random", "30b", "--baseline --batch 1,4,32"),
    _of_model("profile", "profile --random", "coder-next", "--batch 1,4,32"),
    Job("train", "bench train llama-3-8b --json {results}/{gpu}-train.json", after=("tune",)),
    Job("moe", f"bench moe {REPEATS} --json {{results}}/{{gpu}}-moe.json"),
    Job(  # what `workload` weighs beside `widths`
        "moe-widths",
        "bench moe --part grouped --experts 8,32,128,512 --rows 1,2,4,16,64 --bits 2,3,4,5 --dtype fp16 "
        f"{REPEATS} --json {{results}}/{{gpu}}-moe-widths.json",
    ),
    Job("attention", f"bench attention {REPEATS} --json {{results}}/{{gpu}}-attention.json"),
    Job("nvfp4", f"bench nvfp4 {REPEATS} --json {{results}}/{{gpu}}-nvfp4.json"),
    Job(
        "nvfp4-levers",
        f"bench nvfp4 --part levers --shape gateup,l8b --rows 1,8,32,128 {REPEATS} "
        "--json {results}/{gpu}-nvfp4-levers.json",
    ),
    Job(
        "serve",
        "bench serve --random llama-3-8b --option=--cuda-graphs --json {results}/{gpu}-serve.json",
        after=("tune",),
    ),
    Job("quantize", "bench quantize llama-3-8b --layers 8 --json {results}/{gpu}-quantize.json"),
    Job("dequant", f"bench dequant {REPEATS} --dtype fp16,bf16 --json {{results}}/{{gpu}}-dequant.json"),
    Job(
        "gate",
        "gate --toggle all --tokens 1,7,8,32,128 --device cuda --json {results}/{gpu}-nvfp4-gate.json",
    ),
    Job(
        "tensor-parallel",
        "bench model llama-3-70b --gpus 1,2 --all-reduce nccl,one-shot --no-baseline --prefill 0 "
        "--json {results}/{gpu}-parallel-llama-3-70b.json",
        gpus=2,
        after=("tune",),
    ),
    Job(
        "parallel-tests",
        "python -m pytest -q -m gpu tests/test_parallel_gpu.py "
        "tests/test_cuda_ops.py::test_another_device_than_the_current_one",
        gpus=2,
    ),
    Job(
        "30b-parallel",
        "bench model qwen3-30b-a3b --gpus 1,2 --all-reduce nccl,one-shot --no-baseline --prefill 0 "
        "--json {results}/{gpu}-parallel-qwen3-30b-a3b.json",
        gpus=2,
        after=("tune",),
    ),
    Job(
        "coder-next-parallel",  # with the baseline, which one GPU does not hold
        "bench model qwen3-coder-next --gpus 1,2 --all-reduce one-shot --prefill 0 "
        "--json {results}/{gpu}-parallel-qwen3-coder-next.json",
        gpus=2,
        after=("tune",),
    ),
    Job(
        "workload",
        "bench workload {results}/{gpu}-widths.json --experts {results}/{gpu}-moe-widths.json "
        "--plot {plots}/users-fp16.png --json {results}/{gpu}-workload.json",
        gpus=0,
        after=("widths", "moe-widths"),
    ),
    Job("plots", "bench plot {results}/{gpu}-kernels.json --out {plots}", gpus=0, after=("kernels",)),
    Job(
        "30b-profile-plot",
        "bench plot {results}/{gpu}-profile-qwen3-30b-a3b.json --out {plots}",
        gpus=0,
        after=("30b-profile",),
    ),
    Job(
        "generate-plot",
        "bench plot {results}/{gpu}-generate-qwen3-30b-a3b.json --out {plots}",
        gpus=0,
        after=("30b-generate",),
    ),
    Job(
        "chat-plot",
        "bench plot {results}/{gpu}-chat-qwen3-30b-a3b.json --out {plots}",
        gpus=0,
        after=("30b-chat",),
    ),
    # Its figures come from `kbit eval` on a CPU, with a model that is not in the repository.
    Job("quality-plot", "bench plot {results}/quality-tiny-moe.json --out docs/plots", gpus=0),
)
WIDTH = max(len(job.name) for job in JOBS)  # of a column of names


@dataclass
class Running:
    """A job under way."""

    job: Job
    process: subprocess.Popen[bytes]
    gpus: Sequence[str]
    start: float


def ready(waiting: Sequence[Job], running: Sequence[Running], free: int) -> Job | None:
    """The first waiting job whose GPUs are free and that waits for none of the others.

    A job that needs more GPUs than are free holds back those after it, or it would wait forever.
    """
    unfinished = {job.name for job in waiting} | {each.job.name for each in running}
    for job in waiting:
        if set(job.after) & unfinished:
            continue
        return job if job.gpus <= free else None
    return None


def without_results(waiting: Sequence[Job], done: Mapping[str, tuple[int, float]]) -> Job | None:
    """A waiting job that reads results of one that failed."""
    failed = {name for name, (code, _) in done.items() if code}
    return next((job for job in waiting if failed & set(job.after)), None)


def run(jobs: Sequence[Job], gpus: Sequence[str], gpu: str, logs: Path) -> dict[str, tuple[int, float]]:
    """Run jobs as GPUs get free; exit code and seconds of each."""
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, done = list(jobs), list[Running](), dict[str, tuple[int, float]]()
    free = list(gpus)
    try:
        while waiting or running:
            while (job := ready(waiting, running, len(free))) is not None:
                mine, free = free[: job.gpus], free[job.gpus :]
                # Jobs that each take all cores spin in wait for one another.
                threads = max(1, (os.cpu_count() or 1) * job.gpus // max(1, len(gpus)))
                environment = {"OMP_NUM_THREADS": str(threads)} | os.environ
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
                with (logs / f"{job.name}.log").open("wb") as log:
                    process = subprocess.Popen(
                        job.command(gpu), cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                waiting.remove(job)
                running.append(Running(job, process, mine, time.monotonic()))
            time.sleep(POLL_SECONDS)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free = [*free, *each.gpus]
                seconds = time.monotonic() - each.start
                done[each.job.name] = (each.process.returncode, seconds)
                state = "done" if each.process.returncode == 0 else f"exit code {each.process.returncode}"
                print(f"{each.job.name:{WIDTH}} {seconds:6.0f} s  {state}", flush=True)
            while (job := without_results(waiting, done)) is not None:
                waiting.remove(job)
                done[job.name] = (NOT_RUN, 0.0)
                print(f"{job.name:{WIDTH}}             not run: it needs one that failed", flush=True)
    finally:
        for each in running:
            each.process.terminate()
    return done


def chosen(names: Sequence[str], most_gpus: int) -> list[Job]:
    """The jobs of these names, or all, that so many GPUs can run.

    Raises:
        ValueError: there is no such job.
    """
    unknown = sorted(set(names) - {job.name for job in JOBS})
    if unknown:
        raise ValueError(f"no job {', '.join(unknown)}; there are {', '.join(job.name for job in JOBS)}")
    return [job for job in JOBS if (not names or job.name in names) and job.gpus <= most_gpus]


def gpu_name(full: str) -> str:
    """Such as "h200", in names of files."""
    from kbit.backends.cuda.tables import slug

    return slug(full).removeprefix("nvidia-")


def main() -> int:
    """Exit code 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="these jobs")
    parser.add_argument("--gpus", help="numbers of the GPUs, such as 0,1; all by default")
    parser.add_argument("--name", help="of the GPU in file names; its own by default, such as h200")
    parser.add_argument("--list", action="store_true", help="say what there is")
    given = parser.parse_args()
    if given.list:
        for job in JOBS:
            print(f"{job.name:{WIDTH}} {job.words}")
        return 0
    import torch

    count = torch.cuda.device_count()
    gpus = (given.gpus or ",".join(map(str, range(count)))).split(",") if count else []
    try:
        jobs = chosen(given.only, len(gpus))
    except ValueError as error:
        parser.error(str(error))
    if not count and (not given.only or len(jobs) < len(set(given.only))):
        parser.error("there is no GPU that torch can use")
    name = given.name or (gpu_name(torch.cuda.get_device_name()) if count else "none")
    for folder in (SHIPPED_TABLES, plots_of(name)):
        folder.mkdir(parents=True, exist_ok=True)
    done = run(jobs, gpus, name, LOGS)
    return int(any(code for code, _ in done.values()))


if __name__ == "__main__":
    sys.exit(main())
