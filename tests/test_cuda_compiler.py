"""The run-time compiler and its cache, on a kernel of their own. Needs NVRTC, neither a GPU nor a driver."""

from __future__ import annotations

import builtins
import errno
import multiprocessing
import os
import pickle
import stat
import sys
import warnings
from pathlib import Path

import pytest

from kbit.backends.cuda.compiler import (
    CompilerUnavailableError,
    CubinCache,
    KbitCompileError,
    KernelSpec,
    UnsupportedArchError,
    arch_of,
    as_on_chips,
    cache,
    canonical_arch,
    compile_kernel,
    compile_many,
    nvcc,
    nvrtc,
    report,
)

if sys.platform == "darwin":
    pytest.skip("NVIDIA publishes no compiler for macOS", allow_module_level=True)

SOURCE = """#include "config.h"
#include "helper.cuh"

extern "C" __global__ void scale(float* x, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] = helper(x[i]) * Config::factor;
}
"""
HELPER = "__device__ inline float helper(float x) { return x + 1.0f; }\n"
SPEC = KernelSpec.make("scale.cu", factor=3, exact=False)


@pytest.fixture
def csrc(tmp_path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "scale.cu").write_text(SOURCE)
    (folder / "helper.cuh").write_text(HELPER)
    (folder / "unrelated.cuh").write_text("")
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache's folder, empty; warnings that are given once may be given again."""
    for name in ("KBIT_CUDA_COMPILER", "KBIT_CUDA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "cache" / "cubin"


def cubins(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))


# -- specs and architectures ---------------------------------------------------------------------------------


def test_a_spec_renders_its_configuration():
    spec = KernelSpec.make("stream.cu", bits=4, bf16=False)
    assert (spec.entry, spec.name) == ("stream", "stream[bits=4,bf16=0]")
    assert "static constexpr int bits = 4;" in spec.config_header
    assert "static constexpr bool bf16 = false;" in spec.config_header
    assert spec == KernelSpec("stream.cu", (("bits", 4), ("bf16", False)))


@pytest.mark.parametrize(("source", "config"), [("a.cuh", {}), ("a.cu", {"x": 2.0}), ("a.cu", {"x": 2**31})])
def test_a_spec_refuses_what_it_cannot_render(source, config):
    with pytest.raises(ValueError, match=r"a\.cu"):
        KernelSpec.make(source, **config)


def test_architectures_have_one_name():
    assert {canonical_arch(name) for name in ("90a", "sm_90a", "9.0a", "SM_90A")} == {"90a"}
    assert [arch_of(8, 0), arch_of(8, 9), arch_of(9, 0), arch_of(12, 0)] == ["80", "89", "90a", "120a"]
    assert [as_on_chips(arch) for arch in ("80", "90", "90a", "120", "120f")] == [
        "80",
        "90a",
        "90a",
        "120a",
        "120a",
    ]


@pytest.mark.parametrize("arch", ["", "hopper", "75", "9", "sm_90x"])
def test_other_architectures_are_refused(arch):
    with pytest.raises(UnsupportedArchError, match="Write it as|need sm_80"):
        canonical_arch(arch)


def test_an_architecture_that_the_compiler_does_not_know(csrc):
    with pytest.raises(UnsupportedArchError, match=r"cannot compile for sm_999a; it knows .*90.*Upgrade"):
        compile_kernel(SPEC, "999a", csrc=csrc)


# -- compiling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["80", "90a"])
def test_compiles_to_machine_code_with_a_report(csrc, arch):
    kernel = compile_kernel(SPEC, arch, csrc=csrc)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert b"scale" in kernel.cubin
    assert 0 < kernel.registers <= 32
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.cached) == (0, 0, False)
    assert f"sm_{arch}" in kernel.log


def test_spills_are_reported(csrc):
    text = "".join(f"    float v{i} = x[{i} * n];\n" for i in range(128))
    text += "    __syncthreads();\n" + "".join(
        f"    x[{i} * n + 1] = v{i} * v{(i * 7) % 128};\n" for i in range(128)
    )
    bounds = "__launch_bounds__(1024, 2)"
    (csrc / "spill.cu").write_text(
        f'extern "C" __global__ void {bounds} spill(float* x, int n) {{\n{text}}}\n'
    )
    kernel = compile_kernel(KernelSpec.make("spill.cu"), "90a", csrc=csrc)
    assert kernel.registers == 32
    assert kernel.spill_bytes > 100
    assert "spill" in kernel.log


def test_the_report_adds_functions_up():
    log = """ptxas info    : Compiling entry function 'k' for 'sm_90a'
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Function properties for called
    0 bytes stack frame, 1 bytes spill stores, 0 bytes spill loads"""
    assert report.parse(log) == report.Report(registers=40, spill_bytes=13, stack_bytes=16, shared_bytes=4096)


def test_a_syntax_error_names_file_line_kernel_and_architecture(csrc, folder):
    (csrc / "scale.cu").write_text(SOURCE.replace("x[i])", "x[i]"))
    with pytest.raises(KbitCompileError) as caught:
        compile_kernel(SPEC, "90a", csrc=csrc)
    message = str(caught.value)
    assert message.startswith("scale[factor=3,exact=0] does not compile for sm_90a with NVRTC ")
    assert "scale.cu(6): error" in message
    assert "--gpu-architecture=sm_90a" in message
    assert cubins(folder) == []
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.log, again.arch) == (message, caught.value.log, "90a")


def test_an_error_in_a_header_names_the_header(csrc):
    (csrc / "helper.cuh").write_text("\n\nnonsense\n")
    with pytest.raises(KbitCompileError, match=r"helper\.cuh\(3\): error"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_a_wrong_option_is_shown(csrc, monkeypatch):
    monkeypatch.setenv("KBIT_CUDA_FLAGS", "--no-such-option")
    with pytest.raises(KbitCompileError, match="no-such-option"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_many_in_parallel_keep_their_order_and_errors(csrc):
    (csrc / "broken.cu").write_text("nonsense")
    specs = [KernelSpec.make("scale.cu", factor=factor) for factor in range(3)]
    wanted = [(specs[0], "80"), (KernelSpec.make("broken.cu"), "80"), (specs[1], "80"), (specs[2], "999")]
    seen = []
    outcomes = compile_many(wanted, 2, csrc=csrc, on_done=lambda spec, arch, _: seen.append((spec, arch)))
    assert [type(outcome).__name__ for outcome in outcomes] == [
        "CompiledKernel",
        "KbitCompileError",
        "CompiledKernel",
        "UnsupportedArchError",
    ]
    assert sorted(seen, key=str) == sorted(wanted, key=str)
    assert [outcome.spec for outcome in outcomes[::2]] == specs[:2]


# -- the cache -----------------------------------------------------------------------------------------------


def test_the_second_time_comes_from_the_cache(csrc, folder, monkeypatch):
    first = compile_kernel(SPEC, "90a", csrc=csrc)
    (path,) = cubins(folder)
    assert path.name.startswith("scale-sm90a-")
    assert [stat.S_IMODE(found.stat().st_mode) for found in (folder, path)] == [0o755, 0o644]
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", None)
    second = compile_kernel(SPEC, "sm_90a", csrc=csrc)
    assert second.cached
    assert (second.cubin, second.log, second.registers) == (first.cubin, first.log, first.registers)


def test_a_header_that_is_not_included_changes_nothing(csrc, folder):
    compile_kernel(SPEC, "80", csrc=csrc)
    (csrc / "unrelated.cuh").write_text("nonsense")
    assert compile_kernel(SPEC, "80", csrc=csrc).cached
    assert len(cubins(folder)) == 1


def test_whatever_decides_the_code_changes_the_key(csrc, folder, monkeypatch):
    def compiled(spec=SPEC, arch="80") -> int:
        assert not compile_kernel(spec, arch, csrc=csrc).cached
        assert compile_kernel(spec, arch, csrc=csrc).cached
        return len(cubins(folder))

    assert compiled() == 1
    assert compiled(arch="89") == 2
    assert compiled(KernelSpec.make("scale.cu", factor=4, exact=False)) == 3
    (csrc / "helper.cuh").write_text(HELPER.replace("1.0f", "2.0f"))
    assert compiled() == 4
    (csrc / "scale.cu").write_text(SOURCE + "\n")
    assert compiled() == 5
    monkeypatch.setenv("KBIT_CUDA_FLAGS", "-lineinfo")
    assert compiled() == 6
    monkeypatch.setattr(nvrtc.Nvrtc, "identity", "NVRTC 99")
    assert compiled() == 7


def test_kernels_wait_first_where_those_of_torch_compile_start_early(csrc, folder):
    import torch._inductor.config as inductor

    (csrc / "scale.cu").write_text("#ifdef KBIT_WAIT_FIRST\n#error waits first\n#endif\n" + SOURCE)
    compile_kernel(SPEC, "90a", csrc=csrc)
    with inductor.patch("triton.enable_pdl", True), pytest.raises(KbitCompileError, match="waits first"):
        compile_kernel(SPEC, "90a", csrc=csrc)


@pytest.mark.parametrize("damage", ["cut", "grown", "flipped", "empty", "another key"])
def test_a_damaged_entry_is_compiled_anew(csrc, folder, damage):
    whole = compile_kernel(SPEC, "80", csrc=csrc)
    (path,) = cubins(folder)
    content = path.read_bytes()
    middle = len(whole.cubin) // 2
    if damage == "another key":
        compile_kernel(KernelSpec.make("scale.cu", factor=4), "80", csrc=csrc)
        (other,) = set(cubins(folder)) - {path}
        damaged = other.read_bytes()
    else:
        damaged = {
            "cut": content[:middle],
            "grown": b"\0" + content,
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "empty": b"",
        }[damage]
    path.write_bytes(damaged)
    again = compile_kernel(SPEC, "80", csrc=csrc)
    assert not again.cached
    assert again.cubin == whole.cubin
    assert path.read_bytes()[: len(whole.cubin)] == whole.cubin
    assert compile_kernel(SPEC, "80", csrc=csrc).cached


def compile_at_once(csrc: Path, barrier, results) -> None:
    warnings.simplefilter("error")
    barrier.wait()
    kernel = compile_kernel(SPEC, "90a", csrc=csrc)
    results.put((kernel.cached, kernel.cubin))


def test_sixteen_processes_make_one_entry(csrc, folder):
    # Forked from a fresh process that has imported torch already: 16 imports would take most of a minute.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kbit.backends.cuda.compiler.nvrtc"])
    barrier, results = context.Barrier(16), context.Queue()
    processes = [context.Process(target=compile_at_once, args=(csrc, barrier, results)) for _ in range(16)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 16
    assert [cached for cached, _ in outcomes].count(False) == 1, "the others wait for the one that compiles"
    assert len({cubin for _, cubin in outcomes}) == 1
    assert len(cubins(folder)) == 1
    assert list(folder.glob(".new-*")) == []
    assert compile_kernel(SPEC, "90a", csrc=csrc).cached


def test_an_unusable_folder_is_one_warning(csrc, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cannot be used: .*Not a directory.*Set KBIT_CACHE"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_kernel(SPEC, "80", csrc=csrc).registers > 0


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_one_warning(csrc, folder, monkeypatch, code):
    def read_only(**_):  # root may write to any folder, so chmod alone would prove nothing
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.tempfile, "mkstemp", read_only)
    with pytest.warns(UserWarning, match=f"nothing can be written there: {os.strerror(code)}"):
        assert compile_kernel(SPEC, "80", csrc=csrc).registers > 0
    assert cubins(folder) == []


def test_a_full_disk_is_one_warning_and_leaves_nothing(csrc, folder, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        assert compile_kernel(SPEC, "80", csrc=csrc).registers > 0
    assert list(folder.glob(".new-*")) == []


def test_what_others_may_write_is_not_loaded(csrc, folder):
    compile_kernel(SPEC, "80", csrc=csrc)
    (path,) = cubins(folder)
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="everybody may write"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached
    folder.chmod(0o700)
    path.chmod(0o666)
    assert not compile_kernel(SPEC, "80", csrc=csrc).cached
    assert compile_kernel(SPEC, "80", csrc=csrc).cached, "replaced by a file of our own"


def test_what_belongs_to_others_is_not_loaded(csrc, monkeypatch):
    compile_kernel(SPEC, "80", csrc=csrc)
    if os.geteuid() == 0:
        for path in (CubinCache().folder, *cubins(CubinCache().folder)):
            os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can be two users")
def test_what_root_compiled_serves_every_user(csrc, monkeypatch):
    whole = compile_kernel(SPEC, "80", csrc=csrc)
    monkeypatch.setattr(cache.os, "geteuid", lambda: 12345)
    again = compile_kernel(SPEC, "80", csrc=csrc)
    assert again.cached
    assert again.cubin == whole.cubin


def test_a_link_is_not_followed(csrc, folder, tmp_path):
    compile_kernel(SPEC, "80", csrc=csrc)
    (path,) = cubins(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="cannot be read"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
@pytest.mark.parametrize("make", [os.mkdir, getattr(os, "mkfifo", None)])
def test_what_is_no_file_is_not_read(csrc, folder, make):
    compile_kernel(SPEC, "80", csrc=csrc)
    (path,) = cubins(folder)
    path.unlink()
    make(path)
    with pytest.warns(UserWarning, match="is no file"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached


def test_a_disk_that_fails_is_one_warning(csrc, folder, monkeypatch):
    compile_kernel(SPEC, "80", csrc=csrc)

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(cache, "_doubt", failing)
    with pytest.warns(UserWarning, match="cannot be read: Input/output error"):
        assert not compile_kernel(SPEC, "80", csrc=csrc).cached


@pytest.mark.skipif(os.name == "nt", reason="Windows does not tell who may write")
def test_no_lock_where_others_may_put_a_link(folder):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with CubinCache().lock("scale-sm80", "0" * 64):
        assert list(folder.iterdir()) == []


def test_a_held_lock_only_delays(csrc, folder, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    key = "0" * 64
    with CubinCache().lock("scale-sm80", key), CubinCache().lock("scale-sm80", key):
        pass
    assert folder.is_dir()


# -- what may be missing -------------------------------------------------------------------------------------


def refuse_imports(monkeypatch, *names: str) -> None:
    real = builtins.__import__

    def refusing(name, globals=None, locals=None, fromlist=(), level=0):
        if any(name == refused or name.startswith(f"{refused}.") for refused in names):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", refusing)


def test_without_cuda_bindings(csrc, monkeypatch):
    refuse_imports(monkeypatch, "cuda")
    message = r"cuda-bindings.*pip install cuda-bindings nvidia-cuda-nvrtc.*nvcc"
    with pytest.raises(CompilerUnavailableError, match=message):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_without_the_library(csrc, monkeypatch):
    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so": No such file\nattempts: ...')

    monkeypatch.setattr(nvrtc._bindings(), "nvrtcVersion", missing)
    with pytest.raises(
        CompilerUnavailableError, match=r"not the NVRTC library \(Failure finding .*pip install"
    ):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_an_unknown_compiler(csrc, monkeypatch):
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "clang")
    with pytest.raises(CompilerUnavailableError, match="'clang'; known: nvrtc, nvcc"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_options_that_cannot_be_read(csrc, monkeypatch):
    monkeypatch.setenv("KBIT_CUDA_FLAGS", "-DX='1")
    with pytest.raises(CompilerUnavailableError, match=r"KBIT_CUDA_FLAGS is .*No closing quotation.*unset"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_nvcc_takes_no_options_for_other_builds(csrc, monkeypatch, tmp_path):
    """The cache's key would not tell what was made with them from what was not."""
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        "#!/bin/sh\n[ $# = 1 ] && echo release 13.0 sm_80 && exit\n"
        "for last; do true; done; env | grep -c '^NVCC_' > \"$last\" || true\n"
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    monkeypatch.setenv("KBIT_NVCC", str(compiler))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-use_fast_math")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
    assert compile_kernel(SPEC, "80", csrc=csrc).cubin == b"0\n"


def test_without_nvcc(csrc, monkeypatch, tmp_path):
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    for name in ("KBIT_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        CompilerUnavailableError, match=r"nvcc was not found.*KBIT_NVCC, in CUDA_HOME, nor on PATH"
    ):
        compile_kernel(SPEC, "80", csrc=csrc)
    monkeypatch.setenv("KBIT_NVCC", str(tmp_path / "nvcc"))
    with pytest.raises(CompilerUnavailableError, match=r"KBIT_NVCC=.*no program"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_an_nvcc_that_does_not_run(csrc, monkeypatch, tmp_path):
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    monkeypatch.setenv("KBIT_NVCC", str(broken))
    with pytest.raises(CompilerUnavailableError, match="--version` fails"):
        compile_kernel(SPEC, "80", csrc=csrc)


def test_nvcc_compiles_the_same_kernel(csrc, folder, monkeypatch):
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    try:
        nvcc.find_nvcc()
    except CompilerUnavailableError as missing:
        pytest.skip(str(missing))
    kernel = compile_kernel(SPEC, "90a", csrc=csrc)
    assert kernel.cubin.startswith(b"\x7fELF")
    assert kernel.registers > 0
    assert compile_kernel(SPEC, "90a", csrc=csrc).cached
    monkeypatch.delenv("KBIT_CUDA_COMPILER")
    assert not compile_kernel(SPEC, "90a", csrc=csrc).cached, "the compilers' entries are kept apart"
    monkeypatch.setenv("KBIT_CUDA_COMPILER", "nvcc")
    (csrc / "scale.cu").write_text(SOURCE.replace("x[i])", "x[i]"))
    with pytest.raises(KbitCompileError, match=r"scale\.cu\(6\): error"):
        compile_kernel(SPEC, "90a", csrc=csrc)
