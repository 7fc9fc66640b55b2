"""tools/measure.py: what runs when, on which GPUs, and that its commands exist."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kbit.cli import app

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("measure", ROOT / "tools" / "measure.py")
measure = importlib.util.module_from_spec(SPEC)
sys.modules["measure"] = measure  # dataclasses look their module up
SPEC.loader.exec_module(measure)

# Writes the GPUs it sees, when it started and when it ended.
SCRIPT = """
import os, sys, time
start = time.time()
time.sleep({seconds})
print("GPUs:" + os.environ["CUDA_VISIBLE_DEVICES"], start, time.time())
sys.exit({code})
"""


@dataclass(frozen=True)
class Fake(measure.Job):
    code: int = 0
    seconds: float = 0.3

    def command(self, gpu):
        return [sys.executable, "-c", SCRIPT.format(seconds=self.seconds, code=self.code)]


def run(tmp_path, jobs, gpus):
    done = measure.run(jobs, gpus, "made-up", tmp_path)
    logs = {job.name: (tmp_path / f"{job.name}.log").read_text().split() for job in jobs}
    return done, {
        name: (gpus.removeprefix("GPUs:"), float(start), float(end))
        for name, (gpus, start, end) in logs.items()
    }


def test_jobs_have_their_gpus_to_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "POLL_SECONDS", 0.05)
    jobs = [Fake("a", ""), Fake("both", "", gpus=2), Fake("b", "", code=3), Fake("none", "", gpus=0)]
    done, logs = run(tmp_path, jobs, ["0", "1"])
    assert {name: code for name, (code, _) in done.items()} == {"a": 0, "both": 0, "b": 3, "none": 0}
    assert sorted(logs["both"][0]) == [",", "0", "1"]
    assert logs["none"][0] == ""
    alone = [job for job in ("a", "b") if logs[job][1] < logs["both"][2] and logs["both"][1] < logs[job][2]]
    assert alone == []


def test_jobs_wait_for_what_they_read(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "POLL_SECONDS", 0.05)
    jobs = [Fake("first", ""), Fake("second", "", after=("first",)), Fake("third", "", after=("absent",))]
    _, logs = run(tmp_path, jobs, ["0", "1"])
    assert logs["second"][1] >= logs["first"][2]
    assert logs["third"][1] < logs["first"][2]


def test_choice_of_jobs():
    assert [job.name for job in measure.chosen(["moe", "tune"], 1)] == ["tune", "moe"]
    assert all(job.gpus <= 1 for job in measure.chosen([], 1))
    with pytest.raises(ValueError, match="no job nonsense; there are tune"):
        measure.chosen(["nonsense"], 1)


@pytest.mark.parametrize("job", measure.JOBS, ids=lambda job: job.name)
def test_commands_exist(job):
    assert set(job.after) <= {each.name for each in measure.JOBS}
    command = job.command("h200")
    assert not re.search(r"[{}]", " ".join(command))
    if command[1:3] != ["-m", "kbit"]:
        files = [word for word in command[1:] if "/" in word and "{" not in word and word.endswith(".py")]
        assert files or command[1:3] == ["-m", "pytest"]
        assert all((ROOT / file).is_file() for file in files)
        return
    known, rest = get_command(app), command[3:]
    while hasattr(known, "commands"):
        known, rest = known.commands[rest[0]], rest[1:]
    options = {name for each in known.params for name in (*each.opts, *each.secondary_opts)}
    assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= options


def test_every_picture_of_the_documentation_is_drawn(tmp_path):
    """By a job that names its file, or by `bench plot` of results that are there."""
    shown = {path.name for path in (ROOT / "docs" / "plots").iterdir()}
    commands = [job.command("h200") for job in measure.JOBS]
    drawn = {Path(word).name for command in commands for word in command if word.endswith(".png")}
    for command in commands:
        if command[3:5] == ["bench", "plot"]:
            result = CliRunner().invoke(app, [*command[3:6], "--out", str(tmp_path)])
            assert result.exit_code == 0, result.output
    assert shown <= drawn | {path.name for path in tmp_path.iterdir()}


def test_what_needs_a_failed_job_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "POLL_SECONDS", 0.05)
    jobs = [Fake("first", "", code=3), Fake("then", "", after=("first",)), Fake("last", "", after=("then",))]
    done = measure.run([*jobs, Fake("other", "", after=("away",))], ["0"], "made-up", tmp_path)
    assert {name: code for name, (code, _) in done.items()} == {
        "first": 3,
        "then": measure.NOT_RUN,
        "last": measure.NOT_RUN,
        "other": 0,
    }
    assert not (tmp_path / "then.log").exists()
