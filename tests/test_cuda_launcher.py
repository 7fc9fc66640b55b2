"""The launcher: on a GPU with kernels of its own; without one, that each thing missing is said."""

from __future__ import annotations

import functools
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kbit.backends.cuda import driver, launcher, libraries
from kbit.backends.cuda.compiler import CompiledKernel, KernelSpec, UnsupportedArchError
from kbit.backends.cuda.driver import DriverError

if sys.platform == "darwin":
    pytest.skip("NVIDIA publishes no driver for macOS", allow_module_level=True)

ADD = """#include "config.h"
extern __shared__ float scratch[];

// out = a + scale * b; through dynamic shared memory where Config::shared.
extern "C" __global__ void add(const float* a, const float* b, float* out, long long n, int repeat,
                               float scale) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= n) return;
    float value = a[i];
    for (int r = 0; r < repeat; r++) value += scale * b[i];
    if (Config::shared) {
        scratch[24 * 1024 + threadIdx.x] = value;
        value = scratch[24 * 1024 + threadIdx.x];
    }
    out[i] = value;
}
"""
CLUSTER = """extern "C" __global__ void cluster(unsigned* out) {
    unsigned size, rank;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) out[blockIdx.x] = size * 100 + rank;
}
"""
FORMAT = "QQQQif"
SHARED = 128 * 1024


@pytest.fixture
def csrc(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path / "cache"))
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    without = "\n".join(line for line in ADD.splitlines() if "griddepcontrol" not in line)
    (tmp_path / "add.cu").write_text(ADD if hopper else without)
    (tmp_path / "cluster.cu").write_text(CLUSTER)
    return tmp_path


class Adder:
    """The kernel, and what it takes."""

    def __init__(self, csrc: Path, shared: bool = False, n: int = 10_000) -> None:
        self.kernel = launcher.load(KernelSpec.make("add.cu", shared=shared), 0, FORMAT, csrc=csrc)
        self.a, self.b = torch.randn(2, n, device="cuda")
        self.out = torch.full_like(self.a, float("nan"))

    def __call__(self, repeat: int = 1, a: torch.Tensor | None = None, **options: object) -> torch.Tensor:
        a, n = self.a if a is None else a, self.a.numel()
        args = (a.data_ptr(), self.b.data_ptr(), self.out.data_ptr(), n, repeat, 0.5)
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch((-(-n // 256), 1, 1), 256, args, stream=stream, **options)
        return self.out


@pytest.mark.gpu
def test_launch(csrc):
    add = Adder(csrc)
    assert torch.equal(add(), add.a + 0.5 * add.b)
    assert launcher.load(KernelSpec.make("add.cu", shared=False), 0, FORMAT, csrc=csrc) is add.kernel


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_launches_on_one_stream_follow_each_other(csrc, pdl):
    add = Adder(csrc)
    add.out.zero_()
    add.b.fill_(2)
    for _ in range(100):
        add(a=add.out, pdl=pdl)
    assert (add.out == 100).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2, 8, 16])
def test_clusters(csrc, size):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters came with sm_90")
    kernel = launcher.load(KernelSpec.make("cluster.cu"), 0, "Q", csrc=csrc)
    if size > 1 and not kernel.takes_cluster(size, 32, 0):
        assert size > launcher.PORTABLE_CLUSTER
        pytest.skip("this GPU has none of 16 blocks")
    out = torch.zeros(16, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch((16, 1, 1), 32, (out.data_ptr(),), stream=stream, cluster=size, pdl=True)
    assert out.tolist() == [100 * size + block % size for block in range(16)]
    assert not kernel.takes_cluster(8, 2048, 0)  # so many threads no block has


@pytest.mark.gpu
def test_much_shared_memory(csrc):
    add = Adder(csrc, shared=True)
    assert torch.equal(add(smem=SHARED), add.a + 0.5 * add.b)
    with pytest.raises(ValueError, match="a block cannot have 1000000 bytes"):
        add(smem=1_000_000)
    assert torch.equal(add(smem=SHARED - 4096), add.a + 0.5 * add.b)


@pytest.mark.gpu
def test_two_streams_and_threads(csrc):
    errors = []

    def work(number: int) -> None:
        try:
            add = Adder(csrc, n=10_000 + number)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for repeat in range(50):
                    result = add(repeat).clone()
                    assert torch.allclose(result, add.a + 0.5 * repeat * add.b, atol=1e-3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.gpu
def test_a_thread_that_never_used_cuda(csrc):
    add = Adder(csrc)
    args = (add.a.data_ptr(), add.b.data_ptr(), add.out.data_ptr(), add.a.numel(), 1, 0.5)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: add.kernel.launch((40, 1, 1), 256, args, stream=0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(add.out, add.a + 0.5 * add.b)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_graph_capture_and_replay(csrc, pdl):
    add = Adder(csrc)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Loading during the capture, too: a kernel may be met there first.
        late = Adder.__new__(Adder)
        late.kernel = launcher.load(KernelSpec.make("add.cu", shared=True), 0, FORMAT, csrc=csrc)
        late.a, late.b, late.out = add.a, add.b, add.out
        add()
        late(a=add.out, smem=SHARED, pdl=pdl)
    add.out.fill_(float("nan"))
    for _ in range(3):
        add.a.uniform_()
        graph.replay()
        assert torch.allclose(add.out, add.a + add.b, atol=1e-6)


@pytest.mark.gpu
def test_wrong_calls_are_explained(csrc):
    add = Adder(csrc)
    launch = add.kernel.launch
    with pytest.raises(ValueError, match=r"add\[shared=0\] takes 6 arguments \(QQQQif\), got 2"):
        launch((1, 1, 1), 32, (1, 2), stream=0)
    with pytest.raises(ValueError, match="does not fit"):
        launch((1, 1, 1), 32, (1, 2, 3, 4, 0.5, 0.5), stream=0)
    with pytest.raises(ValueError, match="clusters have 1 to 16 blocks"):
        launch((1, 1, 1), 32, (1, 2, 3, 0, 0, 0), stream=0, cluster=17)
    with pytest.raises(DriverError, match="launch refused, CUDA_ERROR_INVALID_VALUE"):
        launch((1, 1, 1), 4096, (1, 2, 3, 0, 0, 0), stream=torch.cuda.current_stream().cuda_stream)
    with pytest.raises(DriverError, match="there is no CUDA device 99"):
        launcher.load(KernelSpec.make("add.cu", shared=False), 99, FORMAT, csrc=csrc)


# -- without a GPU: what is said ---------------------------------------------------------------------------


class OldDriver:
    """As much of cuda-bindings' driver as loading asks for, for a device and a refusal of one's choice."""

    capability = (9, 0)
    version = 12040
    refusal = "CUDA_ERROR_NO_BINARY_FOR_GPU"

    def __init__(self) -> None:
        from cuda.bindings import driver as real

        self.real = real
        self.ok = real.CUresult.CUDA_SUCCESS

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)  # the enumerations

    def cuDeviceGetCount(self):
        return self.ok, 1

    def cuDeviceGet(self, index):
        return self.ok, index

    def cuDeviceGetAttribute(self, kind, device):
        return self.ok, self.capability["MAJOR" not in kind.name]

    def cuDriverGetVersion(self):
        return self.ok, self.version

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return self.ok, mode

    def cuLibraryLoadData(self, *_):
        return getattr(self.real.CUresult, self.refusal), None

    def cuGetErrorString(self, code):
        return self.ok, b"as the driver words it"


@pytest.fixture
def old_driver(monkeypatch) -> OldDriver:
    fake = OldDriver()
    monkeypatch.setattr(driver, "api", lambda: fake)
    # Another test's device must not answer from its cache, nor this one's in later tests.
    monkeypatch.setattr(driver, "device_arch", functools.cache(driver.device_arch.__wrapped__))
    compiled = CompiledKernel(KernelSpec.make("add.cu"), "90a", b"", "", 1, 0, 0, 0, 0.0, True)
    monkeypatch.setattr(libraries, "compile_kernel", lambda *_, **__: compiled)
    return fake


def test_an_old_driver_is_told_from_other_errors(old_driver, tmp_path):
    message = r"made for CUDA 12.4, does not take add\[\] as NVRTC \S+ compiled .*NO_BINARY.*cu12==12.4"
    with pytest.raises(DriverError, match=message):
        launcher.load(KernelSpec.make("add.cu"), 0, "Q", csrc=tmp_path)
    old_driver.refusal = "CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(DriverError, match="^cuLibraryLoadData: CUDA_ERROR_OUT_OF_MEMORY"):
        launcher.load(KernelSpec.make("add.cu"), 0, "Q", csrc=tmp_path)


def test_a_driver_from_before_libraries(old_driver, tmp_path, monkeypatch):
    def missing(self, *_):
        raise RuntimeError('Function "cuLibraryLoadData" not found')

    monkeypatch.setattr(OldDriver, "cuLibraryLoadData", missing)
    with pytest.raises(
        DriverError, match=r"made for CUDA 12.4, does not take .*not found.*Update the driver"
    ):
        launcher.load(KernelSpec.make("add.cu"), 0, "Q", csrc=tmp_path)


def test_an_old_gpu(old_driver):
    old_driver.capability = (7, 5)
    with pytest.raises(UnsupportedArchError, match=r"'75': .*need sm_80 or newer.*KBIT_BACKEND=reference"):
        launcher.load(KernelSpec.make("add.cu"), 0, "Q")


def test_an_unknown_letter(old_driver):
    with pytest.raises(ValueError, match="format 'Qz' may hold Q, i, f, T only"):
        launcher.load(KernelSpec.make("add.cu"), 0, "Qz")


def starting(monkeypatch, initialise) -> None:
    import cuda.bindings

    monkeypatch.setattr(cuda.bindings, "driver", SimpleNamespace(cuInit=initialise), raising=False)
    driver.api.__wrapped__()


def test_no_driver(monkeypatch):
    def missing(flags):
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    with pytest.raises(DriverError, match=r"driver was not found \(Failed to dlopen.*nvidia-smi"):
        starting(monkeypatch, missing)


def test_a_driver_that_does_not_start(monkeypatch):
    from cuda.bindings.driver import CUresult

    with pytest.raises(DriverError, match=r"does not start: CUDA_ERROR_NO_DEVICE.*CUDA_VISIBLE_DEVICES"):
        starting(monkeypatch, lambda flags: (CUresult.CUDA_ERROR_NO_DEVICE,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
@pytest.mark.skipif(os.path.exists("/usr/lib/x86_64-linux-gnu/libcuda.so.1"), reason="there is a driver here")
def test_no_driver_here():
    with pytest.raises(DriverError, match="driver"):
        launcher.load(KernelSpec.make("add.cu"), 0, "Q")
