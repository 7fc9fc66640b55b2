"""Commands that fail, are stopped or are killed half-way: what is kept, what is cleaned up, what is said."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from kbit.bench import child, model_build
from kbit.cli import app
from kbit.cli.options import labels
from kbit.cli.outputs import write_json
from kbit.cli.tables import show
from parallel_models import PARALLEL
from tiny_models import write_config

ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")


@pytest.fixture
def config_file(tmp_path) -> Path:
    """The config.json of a tiny model."""
    config = PARALLEL["llama"]()
    path = tmp_path / "config.json"
    return write_config(config, path)


def until(condition, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


# -- results -------------------------------------------------------------------------------------------------

TRAIN = ("--device", "cpu", "--bits", "4,3", "--tokens", "4", "--rank", "2")
MODEL = (
    "--device",
    "cpu",
    "--bits",
    "4,3",
    "--batch",
    "1",
    "--prompt",
    "2",
    "--steps",
    "1",
    "--repeats",
    "1",
)


@pytest.mark.parametrize(("command", "options"), [("train", TRAIN), ("model", MODEL)])
def test_what_was_measured_before_a_failure_is_written_and_printed(
    command, options, config_file, tmp_path, monkeypatch
):
    started, start = [], model_build.start

    def failing(device):
        started.append(device)
        if len(started) == 2:
            raise RuntimeError("out of memory")
        start(device)

    monkeypatch.setattr(model_build, "start", failing)
    out = tmp_path / "result.json"
    arguments = ["bench", command, str(config_file), *options, "--no-baseline", "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert str(result.exception) == "out of memory"
    assert [arm["name"] for arm in json.loads(out.read_text())["arms"]] == ["kbit k=4"]
    assert "kbit k=4" in result.output


def test_a_result_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    for place, message in ((tmp_path, "is a folder"), (tmp_path / "none" / "a.json", "no folder")):
        result = CliRunner().invoke(app, ["bench", "cpu", "--json", str(place)], env={"COLUMNS": "200"})
        assert result.exit_code == 2
        assert message in result.output


def test_results_replace_files_whole(tmp_path, monkeypatch):
    file, link = tmp_path / "result.json", tmp_path / "link.json"
    write_json(file, {"arms": 1})
    link.symlink_to(file)

    def full(self, text):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_json(link, {"arms": 2})
    monkeypatch.undo()
    assert json.loads(file.read_text()) == {"arms": 1}
    write_json(link, {"arms": 2})
    assert link.is_symlink()
    assert json.loads(file.read_text()) == {"arms": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "result.json"]


@posix
def test_results_can_go_to_the_standard_output(tmp_path):
    code = (
        "from pathlib import Path\nfrom kbit.cli.outputs import check_file, write_json\n"
        "print('before'); write_json(check_file(Path('/dev/stdout')), {'a': 1})\n"
        "print('after')"
    )
    for out in (tmp_path / "file", None):
        with open(out or os.devnull, "w") as stream:
            stdout = stream if out else subprocess.PIPE
            result = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, stdout=stdout, check=True)
        text = out.read_text() if out else result.stdout.decode()
        before, *middle, after = text.splitlines()
        assert (before, json.loads("".join(middle)), after) == ("before", {"a": 1}, "after")


def test_folders_of_one_name_keep_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(labels([Path("a/model"), Path("b/model"), Path()])) == ["a/model", "b/model", tmp_path.name]
    for twice in (
        ("model", "model"),
        ("model", "./model"),
        ("a/model", "b/model", "a/../a/model", "a/model"),
    ):
        with pytest.raises(ValueError, match=f"{twice[0]} is given twice. Give each model once."):
            labels([Path(folder) for folder in twice])


# -- processes -----------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cleans_up(number, tmp_path):
    code = f"""
import tempfile, time
import kbit.cli
def work():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        time.sleep(60)
kbit.cli.app = work
kbit.cli.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    assert until(lambda: any(tmp_path.iterdir()))
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    assert not any(tmp_path.iterdir())


# Of torch's imports some catch everything.
INTERRUPTED_TORCH = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException as error:
    print("caught", type(error).__name__)
raise SystemExit("went on")
"""
SCRIPT = "from kbit.cli import main\nmain()\n"


@posix
@pytest.mark.parametrize("way", ["script", "module", "other program", "other program's argument", "ignored"])
def test_ctrl_c_while_torch_is_imported(way, tmp_path):
    (tmp_path / "torch.py").write_text(INTERRUPTED_TORCH)
    (tmp_path / "kbit").write_text(SCRIPT)
    (tmp_path / "other.py").write_text(f"import sys\ndel sys.argv[1:]\n{SCRIPT}")
    arguments = {
        "module": ["-m", "kbit"],
        "other program": ["-c", SCRIPT],
        "other program's argument": ["other.py", "kbit"],
    }.get(way, ["kbit"])
    command = [sys.executable, *arguments]
    if way == "ignored":
        command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    if way in ("script", "module"):
        assert (result.returncode, result.stdout, result.stderr) == (130, "", "Interrupted.\n")
    else:
        assert result.stdout == ("" if way == "ignored" else "caught KeyboardInterrupt\n")
        assert (result.returncode, result.stderr) == (1, "went on\n")


INTERRUPTED_COMMAND = """
@kbit.cli.app.command()
def work():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        print('cleaned up')
"""
INTERRUPTED_ASSEMBLY = """
import typer.main
typer.main.get_params_from_function = lambda _: os.kill(os.getpid(), signal.SIGINT)
"""


@posix
@pytest.mark.parametrize(
    ("code", "command", "said"),
    [(INTERRUPTED_COMMAND, "work", "cleaned up\n"), (INTERRUPTED_ASSEMBLY, "doctor", "")],
    ids=["in a command, which cleans up", "while commands are put together"],
)
def test_ctrl_c(code, command, said, tmp_path):
    (tmp_path / "kbit").write_text(f"import os, signal\nimport kbit.cli\n{code}kbit.cli.main()\n")
    words = [sys.executable, str(tmp_path / "kbit"), command]
    result = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (130, said, "Interrupted.\n")


@posix
def test_children_of_a_killed_process_end(tmp_path):
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(120)\n")
    (tmp_path / "parent.py").write_text(
        "import time\nfrom kbit.bench import child\n"
        "print(child.start('sleeper').pid, flush=True)\ntime.sleep(120)\n"
    )
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py")], env=environment, stdout=-1, text=True
    )
    assert parent.stdout is not None
    started = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert until(lambda: not alive(started)), "the child outlives the process that started it"


def alive(process: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_get_arguments_and_give_their_code(tmp_path):
    (tmp_path / "report.py").write_text("import sys\nprint(__name__, *sys.argv[1:])\nsys.exit(3)\n")
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = child.start("report", "--x", "1", env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.read() == "__main__ --x 1\n"
    assert process.wait(timeout=30) == 3


# -- tables --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "terminal"), [(80, True), (200, True), (40, False)])
def test_tables_never_break_numbers(columns, terminal, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    table = Table()
    for header in ("arm", "weights GB", "adapters MB", "peak GB", "ms/step", "tok/s", "vs bf16", "loss"):
        table.add_column(header, justify="right")
    table.add_row(
        "kbit k=4, 8 GPUs", "[red]123.45[/]", "1234.5", "123.45", "1234.5", "12345", "0.98", "11.1 -> 10.9"
    )
    show(table)
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if "1234.5" in line)
    for number in ("123.45", "1234.5", "12345", "0.98", "11.1"):
        assert number in row
    if columns == 80:
        assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= columns
