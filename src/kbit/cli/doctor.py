"""`kbit doctor`: what was found on this machine, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from kbit.cli.outputs import PrintedJson, print_json, refuse_arguments
from kbit.cli.tables import show
from kbit.format.words import counted


@dataclass(frozen=True)
class Finding:
    """One line of the report: `remedy` is empty where nothing needs doing; `fatal` where kbit cannot run."""

    what: str
    found: str
    remedy: str = ""
    fatal: bool = False


def _python() -> Finding:
    found = f"{platform.python_version()} ({sys.executable})"
    old = sys.version_info < (3, 10)
    return Finding("python", found, "kbit needs Python 3.10 or newer." if old else "", fatal=old)


def _package(name: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return Finding(name, "not installed", f"pip install {name}", fatal=True)
        wanted = _unmet(name, version)
        return Finding(name, version, wanted and f"pip install '{name}{wanted}'", fatal=bool(wanted))

    return check


def _unmet(name: str, version: str) -> str:
    """What kbit asks of a package, such as ">=5.17", where a version is not that; else nothing.

    Another package's installation may have put an older one in its place since.
    """
    try:
        from packaging.requirements import Requirement
        from packaging.version import Version

        # Builds before a release, as in NVIDIA's containers, are taken for that release.
        base = Version(version).base_version
        stated = [Requirement(text) for text in metadata.requires("kbit") or ()]
    except (ImportError, ValueError):  # no such package: transformers is missing, or kbit is not installed
        return ""
    found = (one for one in stated if one.name == name and one.marker is None)
    return next((str(one.specifier) for one in found if base not in one.specifier), "")


def _cpu() -> Finding:
    from kbit.bench.machine import cpu_model

    return Finding("cpu", f"{cpu_model()}, {os.cpu_count()} cores")


def _kernels() -> Finding:
    from kbit.backends import cpu

    if cpu.available():
        try:
            return Finding("cpu kernels", f"{cpu.isa()} (can run {', '.join(cpu.supported_isas())})")
        except ValueError as error:
            return Finding("cpu kernels", "cannot be chosen", str(error), fatal=True)
    return Finding(
        "cpu kernels",
        f"not built: {cpu.unavailable_reason()}",
        "kbit runs on its slow reference backend. Install a C++17 compiler and the Python headers "
        "(Debian: apt install g++ python3-dev), then reinstall kbit.",
    )


def _compiler() -> Finding:
    found = [name for name in ("c++", "g++", "clang++") if shutil.which(name)]
    headers = Path(sysconfig.get_paths()["include"], "Python.h").is_file()
    text = f"{', '.join(found) or 'none'}; Python headers {'found' if headers else 'missing'}"
    return Finding("c++ compiler", text)


def _threads() -> Finding:
    import torch

    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    threads, cores = torch.get_num_threads(), len(usable)
    remedy = f"More threads than the {cores} usable cores: set OMP_NUM_THREADS={cores}."
    return Finding("threads", f"{threads} of {cores} usable cores", remedy if threads > cores else "")


def _nvidia_in_sight() -> bool:
    """Whether NVIDIA's driver is installed or, on Linux, the PCI bus has a GPU of theirs."""
    from kbit.backends.cuda import driver

    try:
        driver.driver_library()
    except OSError:
        devices = Path("/sys/bus/pci/devices").glob("*")
        return ("0x10de", "0x03") in {(_pci(one, "vendor"), _pci(one, "class")[:4]) for one in devices}
    except AttributeError:  # a driver, but too old for what kbit asks of it
        pass
    return True


def _pci(device: Path, what: str) -> str:
    try:
        return (device / what).read_text().strip()
    except OSError:
        return ""


def _driver() -> Finding:
    from kbit.backends.cuda import driver
    from kbit.backends.cuda.compiler import INSTALL, CompilerUnavailableError

    try:
        return Finding("nvidia driver", f"for CUDA {driver.driver_version()}")
    except CompilerUnavailableError:
        return Finding("nvidia driver", "unknown: asking it needs cuda-bindings", INSTALL)
    except ValueError as error:
        return Finding("nvidia driver", "none", str(error))


def _gpu() -> Finding:
    import torch

    from kbit.backends.cuda import driver

    try:
        found = _count([_gpu_name(index) for index in range(driver.device_count())])
    except ValueError:
        unneeded = "" if _nvidia_in_sight() else " by NVIDIA; driver, cuda-bindings and nvrtc are not needed"
        return Finding("gpu", f"none{unneeded}")
    if torch.cuda.is_available():
        old = "older than sm_80" in found
        return Finding("gpu", found, "Those run kbit's slow reference backend." if old else "")
    if torch.version.cuda is None:
        index = "https://download.pytorch.org/whl/cu130"
        remedy = f"This torch has no CUDA: pip install torch --index-url {index}"
    else:
        remedy = f"torch, built for CUDA {torch.version.cuda}, cannot use it; is the driver older than that?"
    return Finding("gpu", found, remedy)


def _gpu_name(index: int) -> str:
    from kbit.backends.cuda import driver
    from kbit.backends.cuda.compiler import UnsupportedArchError

    name = driver.device_name(index)
    try:
        return f"{name} (sm_{driver.device_arch(index)})"
    except UnsupportedArchError:
        return f"{name} (older than sm_80)"


def _count(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _cuda_bindings() -> Finding:
    from kbit.backends.cuda.compiler import INSTALL

    try:
        return Finding("cuda-bindings", metadata.version("cuda-bindings"))
    except metadata.PackageNotFoundError:
        return Finding("cuda-bindings", "not installed", INSTALL)


def _nvrtc() -> Finding:
    from kbit.backends.cuda import driver
    from kbit.backends.cuda.compiler import UnsupportedArchError, nvrtc

    found = "none"
    try:
        compiler = nvrtc.Nvrtc()
        found = f"{compiler.name} ({nvrtc.library_path() or 'unknown place'})"
        for arch in driver.archs_here():
            compiler.require(arch)
    except ValueError as error:
        if found == "none" or isinstance(error, UnsupportedArchError):  # not that there is no driver
            return Finding("nvrtc", found, str(error))
    return Finding("nvrtc", found)


def _nvcc() -> Finding:
    from kbit.backends.cuda.compiler import nvcc

    wanted = os.environ.get("KBIT_CUDA_COMPILER") == nvcc.KIND or os.environ.get("KBIT_NVCC")
    try:
        return Finding("nvcc", f"{nvcc.Nvcc().name}{'' if wanted else '; used with KBIT_CUDA_COMPILER=nvcc'}")
    except ValueError as error:
        return Finding("nvcc", "none", str(error) if wanted else "")


def _cache() -> Finding:
    from kbit.backends.cuda.compiler import cubin_folder, folder_problem

    folder = cubin_folder()
    problem = folder_problem(folder)
    if problem is not None:
        remedy = "Name a folder of your own: set KBIT_CACHE, or XDG_CACHE_HOME for all programs."
        return Finding("cache folder", f"{folder}: {problem}", remedy)
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    return Finding(
        "cache folder", f"{folder}, writable, {counted(len(sizes), 'kernel')}, {sum(sizes) / 1e6:.1f} MB"
    )


def _settings() -> Finding:
    from kbit.backends.cuda.compiler import COMPILERS
    from kbit.backends.cuda.preference import KERNELS
    from kbit.dispatch.backends import backends
    from kbit.integrations.transformers.collectives import ALL_REDUCES

    # Environment variable -> the values that it may have; None: any, or another line says so.
    known: dict[str, Iterable[str] | None] = dict.fromkeys(
        ("KBIT_CPU_ISA", "KBIT_CACHE", "KBIT_NVCC", "KBIT_CUDA_FLAGS", "KBIT_DEBUG")
    )
    known |= {"KBIT_BACKEND": [backend.name for backend in backends], "KBIT_KERNEL": KERNELS}
    known |= {"KBIT_CUDA_COMPILER": COMPILERS, "KBIT_ALL_REDUCE": ALL_REDUCES}
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("KBIT_")}
    found = {name: value for name, value in found.items() if not name.startswith("KBIT_TEST_")}
    wrong, fatal = [], False
    for name, value in found.items():
        if name not in known:
            wrong.append(f"Nothing reads {name}; known: {', '.join(known)}.")
        elif value and (values := known[name]) is not None and value not in values:
            wrong.append(f"{name} may be {', '.join(values)}.")
            fatal = fatal or name == "KBIT_BACKEND"  # every command asks for it
    shown = ", ".join(f"{name}={value}" for name, value in found.items())
    return Finding("settings", shown or "none", " ".join(wrong), fatal)


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    return Finding("free disk here", f"{free / 1e9:.1f} GB", "Make room first." if free < 1e9 else "")


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    *(_package(name) for name in ("torch", "transformers", "safetensors")),
    _cpu,
    _kernels,
    _compiler,
    _threads,
    _driver,
    _gpu,
    _cuda_bindings,
    _nvrtc,
    _nvcc,
    _cache,
    _settings,
    _disk,
)
# Warnings of these would mislead where there is no GPU to use them.
FOR_GPUS = ("nvidia driver", "cuda-bindings", "nvrtc")


def _findings() -> list[Finding]:
    findings = [check() for check in CHECKS]
    if any(finding.remedy and finding.what in FOR_GPUS for finding in findings) and not _nvidia_in_sight():
        return [finding for finding in findings if not (finding.remedy and finding.what in FOR_GPUS)]
    return findings


def doctor(context: typer.Context, as_json: PrintedJson = False) -> None:
    """Say what was found, what is missing and what to do. Exit 1 if kbit cannot run."""
    refuse_arguments(context, as_json)
    findings = _findings()
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table("", "what", title="kbit doctor", show_lines=False)
        columns = 1 + any(finding.remedy for finding in findings)
        for header in ("found", "what to do")[:columns]:
            table.add_column(header, overflow="fold")
        for finding in findings:
            mark = "[red]x[/]" if finding.fatal else "[yellow]![/]" if finding.remedy else "[green]ok[/]"
            cells = map(escape, (finding.found, finding.remedy)[:columns])
            table.add_row(mark, finding.what, *cells)
        show(table)
    if any(finding.fatal for finding in findings):
        raise typer.Exit(1)
