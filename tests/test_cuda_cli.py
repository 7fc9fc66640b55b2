"""`kbit compile`, and what `kbit doctor` says of GPUs. Needs NVRTC, neither a GPU nor a driver."""

from __future__ import annotations

import builtins
import functools
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbit.backends.cuda import compiler, driver, variants
from kbit.backends.cuda.compiler import KernelSpec, UnsupportedArchError, nvrtc
from kbit.backends.cuda.driver import DriverError
from kbit.cli import app

if sys.platform == "darwin":
    pytest.skip("NVIDIA publishes no compiler for macOS", allow_module_level=True)

SOURCE = """#include "config.h"
extern "C" __global__ void fill(int* x) {
    static_assert(Config::value != 13, "unlucky");
    x[threadIdx.x] = Config::value;
}
"""


@pytest.fixture(autouse=True)
def specs(tmp_path, monkeypatch) -> list[KernelSpec]:
    """The registry with two kernels of the test's own, and an empty cache."""
    for name in ("KBIT_CUDA_COMPILER", "KBIT_CUDA_FLAGS", "KBIT_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "fill.cu").write_text(SOURCE)
    registered = [KernelSpec.make("fill.cu", value=value) for value in (1, 2)]
    monkeypatch.setattr(variants, "all_specs", lambda arch: registered)
    monkeypatch.setattr(
        compiler, "compile_many", functools.partial(compiler.compile_many, csrc=tmp_path), raising=True
    )
    return registered


def compile_command(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


def rows(output: str) -> list[list[str]]:
    """Words of the lines of single kernels: registers, ..., how, architecture, name."""
    return [line.split() for line in output.splitlines() if " fill[" in line]


def sources(output: str) -> list[list[str]]:
    """Cells of the table's rows: a source file and architecture each."""
    return [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if "│ fill.cu" in line
    ]


def test_compile_fills_the_cache(tmp_path):
    result = compile_command("--arch", "90a", "--arch", "sm_80", "--arch", "9.0a", "--jobs", "2", "-v")
    assert result.exit_code == 0, result.output
    table = rows(result.output)
    assert [row[-2:] for row in table] == [
        [arch, f"fill[value={v}]"] for arch in ("90a", "80") for v in (1, 2)
    ]
    assert {row[5] for row in table} == {"compiled"}
    assert "registers  spill bytes  stack bytes  shared bytes  seconds" in result.output
    assert all(int(row[0]) > 0 and row[1] == row[2] == "0" for row in table)  # neither spills nor a stack
    assert len(list((tmp_path / "cache" / "cubin").glob("*.cubin"))) == 4
    again = rows(compile_command("--arch", "90a", "--kernel", "value=2").output)
    assert [row[-3:] for row in again] == [["cached", "90a", "fill[value=2]"]]


def test_compile_sums_kernels_up_by_source(specs, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    compile_command("--arch", "80", "--kernel", "value=2")
    specs.append(KernelSpec.make("fill.cu", value=13))
    result = compile_command("--arch", "80")
    ((source, arch, kernels, compiled, registers, *_, refused),) = sources(result.stdout)
    assert (source, arch, kernels, compiled, refused) == ("fill.cu", "80", "3", "1", "1")
    assert int(registers) > 0
    assert "1 compiled in" in result.stdout
    assert "1 were in the cache, 1 refused" in result.stdout
    assert not rows(result.stdout)


def test_compile_goes_on_after_a_refused_kernel(specs):
    specs.insert(0, KernelSpec.make("fill.cu", value=13))
    result = compile_command("--arch", "80", "--verbose")
    assert result.exit_code == 1
    assert [row[-3] for row in rows(result.stdout)] == ["refused", "compiled", "compiled"]
    assert "fill.cu(3): error" in result.stderr
    assert "unlucky" in result.stderr


def test_compile_takes_the_architectures_of_the_gpus(monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 3)
    monkeypatch.setattr(driver, "device_arch", lambda index: ("89", "90a", "89")[index])
    assert [row[:3] for row in sources(compile_command().output)] == [
        ["fill.cu", "89", "2"],
        ["fill.cu", "90a", "2"],
    ]


def test_compile_leaves_out_gpus_that_are_too_old(monkeypatch):
    def arch(index: int) -> str:
        return driver.arch_of(*((9, 0), (6, 1))[index])

    monkeypatch.setattr(driver, "device_count", lambda: 2)
    monkeypatch.setattr(driver, "device_arch", arch)
    assert [row[1] for row in sources(compile_command().output)] == ["90a"]
    monkeypatch.setattr(driver, "device_arch", lambda index: driver.arch_of(6, 1))
    with pytest.raises(ValueError, match=r"no GPU of sm_80 or newer.*--arch 80"):
        raise compile_command().exception


@pytest.mark.parametrize(("arch", "made"), [("90", "90a"), ("sm_100f", "100a")])
def test_compile_makes_what_chips_load(arch, made):
    assert [row[1] for row in sources(compile_command("--arch", arch).output)] == [made]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "hopper"), "'hopper' is no GPU architecture"),
        (("--arch", "70"), "need sm_80 or newer"),
        (("--arch", "80", "--kernel", "nothing"), "no kernel has 'nothing'"),
        ((), "--arch 80 .A100."),
    ],
)
def test_compile_explains_wrong_requests(arguments, message, monkeypatch):
    def no_driver() -> int:
        raise DriverError("no driver.")

    monkeypatch.setattr(driver, "device_count", no_driver)
    result = compile_command(*arguments)
    assert result.exit_code == 1
    with pytest.raises(ValueError, match=message):
        raise result.exception


def test_compile_needs_a_folder_that_keeps_kernels(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"cannot keep kernels: nothing can be written.*KBIT_CACHE"):
        raise compile_command("--arch", "80").exception


# -- doctor ------------------------------------------------------------------------------------------------


def doctor() -> dict[str, dict[str, str]]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, "what only GPUs need is never fatal"
    return {row["what"]: row for row in json.loads(result.output)}


def test_doctor_lists_gpus_and_driver(monkeypatch):
    def arch(index: int) -> str:
        if index == 2:
            raise UnsupportedArchError("too old")
        return "90a"

    monkeypatch.setattr(driver, "driver_version", lambda: "13.0")
    monkeypatch.setattr(driver, "device_count", lambda: 3)
    monkeypatch.setattr(driver, "device_name", lambda index: "NVIDIA H200" if index < 2 else "Tesla T4")
    monkeypatch.setattr(driver, "device_arch", arch)
    findings = doctor()
    assert findings["nvidia driver"]["found"] == "for CUDA 13.0"
    assert findings["gpu"]["found"] == "2 x NVIDIA H200 (sm_90a), 1 x Tesla T4 (older than sm_80)"


def test_doctor_says_that_a_gpu_is_newer_than_the_compiler(monkeypatch):
    monkeypatch.setattr(driver, "device_count", lambda: 1)
    monkeypatch.setattr(driver, "device_name", lambda index: "NVIDIA X")
    monkeypatch.setattr(driver, "device_arch", lambda index: "990a")
    monkeypatch.setattr(doctor_module(), "_nvidia_in_sight", lambda: True)
    finding = doctor()["nvrtc"]
    assert finding["found"].startswith("NVRTC 1")
    assert "cannot compile for sm_990a" in finding["remedy"]


def test_doctor_says_what_to_do_about_a_missing_driver(monkeypatch):
    def missing() -> str:
        raise DriverError("NVIDIA's driver was not found. Install it.")

    monkeypatch.setattr(driver, "driver_version", missing)
    monkeypatch.setattr(doctor_module(), "_nvidia_in_sight", lambda: True)
    assert "Install it" in doctor()["nvidia driver"]["remedy"]


def test_doctor_finds_compilers(monkeypatch, tmp_path):
    findings = doctor()
    assert findings["nvrtc"]["found"].startswith("NVRTC 1")
    assert findings["cuda-bindings"]["remedy"] == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert doctor()["nvcc"] == {"what": "nvcc", "found": "none", "remedy": "", "fatal": False}
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    assert "Install CUDA's toolkit" in doctor()["nvcc"]["remedy"]


def hide_bindings(monkeypatch) -> None:
    real_import, real_version = builtins.__import__, doctor_module().metadata.version

    def refusing(name, *arguments, **options):
        if name.partition(".")[0] == "cuda":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *arguments, **options)

    def version(name: str) -> str:
        if name == "cuda-bindings":
            raise doctor_module().metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(builtins, "__import__", refusing)
    monkeypatch.setattr(doctor_module().metadata, "version", version)
    driver.api.cache_clear()


def test_doctor_says_how_to_get_what_is_missing(monkeypatch):
    hide_bindings(monkeypatch)
    monkeypatch.setattr(doctor_module(), "_nvidia_in_sight", lambda: True)
    findings = doctor()
    for what in ("cuda-bindings", "nvrtc", "nvidia driver"):
        assert "pip install cuda-bindings nvidia-cuda-nvrtc" in findings[what]["remedy"], what


def test_without_a_gpu_doctor_asks_for_nothing(monkeypatch):
    hide_bindings(monkeypatch)
    monkeypatch.setattr(doctor_module(), "_nvidia_in_sight", lambda: False)
    findings = doctor()
    assert "cuda-bindings and nvrtc are not needed" in findings["gpu"]["found"]
    assert not {"cuda-bindings", "nvrtc", "nvidia driver"} & set(findings)
    assert findings["gpu"]["remedy"] == ""


def test_a_gpu_without_a_driver_is_seen_on_the_bus(monkeypatch, tmp_path):
    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    module = doctor_module()
    monkeypatch.setattr(driver, "driver_library", missing)
    monkeypatch.setattr(module, "Path", lambda *_: tmp_path)
    for kind, seen in (("0x060400", False), ("0x030200", True)):  # a bridge, a 3D controller
        device = tmp_path / kind
        device.mkdir()
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text(kind + "\n")
        assert module._nvidia_in_sight() is seen


def test_doctor_says_where_the_library_is_missing(monkeypatch):
    def missing():
        raise RuntimeError("libnvrtc.so.13 not found")

    monkeypatch.setattr(nvrtc._bindings(), "nvrtcVersion", missing)
    monkeypatch.setattr(doctor_module(), "_nvidia_in_sight", lambda: True)
    assert "libnvrtc.so.13" in doctor()["nvrtc"]["remedy"]


def test_doctor_counts_the_cache(tmp_path, monkeypatch):
    assert "0 kernels" in doctor()["cache folder"]["found"]
    compile_command("--arch", "80")
    found = doctor()["cache folder"]["found"]
    assert str(tmp_path / "cache" / "cubin") in found
    assert "writable, 2 kernels, 0.0 MB" in found
    Path(tmp_path / "cache" / "cubin").chmod(0o777)
    assert "KBIT_CACHE" in doctor()["cache folder"]["remedy"]


def doctor_module():
    return sys.modules["kbit.cli.doctor"]
