"""NVIDIA's driver, through cuda-bindings: starting it, its devices and contexts, and its errors in words."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

from kbit.backends.cuda.compiler import (
    INSTALL,
    CompilerUnavailableError,
    UnsupportedArchError,
    arch_of,
)
from kbit.format.errors import KbitError

HOPPER = "90a"  # architecture of an H100 and an H200
WARP = 32  # threads
MAX_GRID_Y = 65535  # blocks along y, and along z
RESERVED_SHARED_BYTES = 1024  # of a multiprocessor's shared memory, by each block for itself


class DriverError(KbitError, RuntimeError):
    """NVIDIA's driver is missing, too old for what was compiled, or refused a call."""


@functools.cache
def api() -> ModuleType:
    """cuda-bindings' module of the driver, initialised."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CompilerUnavailableError(
            f"launching CUDA kernels needs cuda-bindings, which cannot be imported ({error}). {INSTALL}"
        ) from error
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:
        raise DriverError(
            f"NVIDIA's driver was not found ({error}). Install it; `nvidia-smi` must work."
        ) from error
    if int(code):
        raise DriverError(
            f"NVIDIA's driver does not start: {code.name}. `nvidia-smi` must list a GPU; in a container, "
            f"pass the GPUs in (docker run --gpus all), and see what CUDA_VISIBLE_DEVICES is."
        )
    return driver


@functools.cache
def driver_library() -> ctypes.CDLL:
    """The driver for ctypes, for the call that must be quick, and what takes the same launch."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    library.cuLaunchKernelEx.restype = ctypes.c_int
    library.cuOccupancyMaxActiveClusters.argtypes = (ctypes.c_void_p,) * 3
    library.cuOccupancyMaxActiveClusters.restype = ctypes.c_int
    return library


def device_handle(index: int) -> Any:
    """The driver's handle of a device.

    Raises:
        DriverError: there is no such device.
    """
    count = device_count()
    if not 0 <= index < count:
        raise DriverError(f"there is no CUDA device {index}; the driver shows {count}.")
    return check(api().cuDeviceGet(index), "cuDeviceGet")


@contextmanager
def current(device_index: int) -> Iterator[None]:
    """Make a device's primary context, which torch uses, the thread's current one."""
    cuda = api()
    check(cuda.cuCtxPushCurrent(primary_context(device_index)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        cuda.cuCtxPopCurrent()


@functools.cache
def primary_context(device_index: int) -> Any:
    """The context that torch and the CUDA runtime use on a device; made here if they did not yet."""
    return check(api().cuDevicePrimaryCtxRetain(device_handle(device_index)), "cuDevicePrimaryCtxRetain")


@contextmanager
def lenient_capture() -> Iterator[None]:
    """Let this thread load code while a stream captures; the default forbids whatever might allocate."""
    cuda = api()
    relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = check(cuda.cuThreadExchangeStreamCaptureMode(relaxed), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        cuda.cuThreadExchangeStreamCaptureMode(before)


def check(result: tuple[Any, ...], function: str) -> Any:
    """The value in a result of cuda-bindings.

    Raises:
        DriverError: the result is an error.
    """
    code, *values = result
    if int(code):
        raise DriverError(f"{function}: {error_text(code)}")
    return values[0] if values else None


def error_text(code: int) -> str:
    """An error code in words, such as "CUDA_ERROR_INVALID_VALUE (invalid argument)"."""
    cuda = api()
    result = cuda.CUresult(int(code))
    _, text = cuda.cuGetErrorString(result)
    return f"{result.name} ({text.decode() if text else 'no description'})"


def _attributes(device_index: int, *names: str) -> list[int]:
    """A device's attributes, by their names in the driver behind CU_DEVICE_ATTRIBUTE_."""
    cuda, device = api(), device_handle(device_index)
    kinds = (getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") for name in names)
    return [check(cuda.cuDeviceGetAttribute(kind, device), "cuDeviceGetAttribute") for kind in kinds]


@functools.cache
def device_arch(device_index: int) -> str:
    """Architecture to compile for on a device, such as "90a".

    Raises:
        DriverError: no driver, or no such device.
        UnsupportedArchError: older than sm_80.
    """
    names = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR"
    return arch_of(*_attributes(device_index, *names))


def archs_here() -> list[str]:
    """Architectures of the devices that kbit has kernels for, each once.

    Raises:
        DriverError: no driver.
    """
    found: dict[str, None] = {}
    for index in range(device_count()):
        with suppress(UnsupportedArchError):
            found[device_arch(index)] = None
    return list(found)


def device_name(device_index: int) -> str:
    """Name of a device, such as "NVIDIA H200".

    Raises:
        DriverError: no driver, or no such device.
    """
    name = check(api().cuDeviceGetName(100, device_handle(device_index)), "cuDeviceGetName")
    return str(name.rstrip(b"\0").decode())


def device_count() -> int:
    """Number of GPUs that the driver shows.

    Raises:
        DriverError: no driver.
    """
    return int(check(api().cuDeviceGetCount(), "cuDeviceGetCount"))


def driver_version() -> str:
    """The newest CUDA that the driver knows, such as "13.0".

    Raises:
        DriverError: no driver.
    """
    version = int(check(api().cuDriverGetVersion(), "cuDriverGetVersion"))
    return f"{version // 1000}.{version % 1000 // 10}"


# Share of the multiprocessors that clusters of so many blocks fill at once, with a block on each. A cluster
# stays in one group of 16 or 18 multiprocessors, some lacking, which most sizes do not divide: an H200 takes
# 39 clusters of 3, 17 of 6.
CLUSTER_SHARES = {1: 1.0, 2: 1.0, 3: 0.887, 4: 0.91, 5: 0.834, 6: 0.773, 7: 0.796, 8: 0.91}


def since_hopper(arch: str) -> bool:
    """Whether an architecture, such as "90a", has clusters, and kernels that start before others end."""
    return int(arch.rstrip("af")) >= 90


def room(shared_bytes: int, blocks: int) -> int:
    """Shared memory of each of so many blocks on a multiprocessor, of which one may have `shared_bytes`."""
    return (shared_bytes + RESERVED_SHARED_BYTES) // blocks - RESERVED_SHARED_BYTES


class DeviceLimits(NamedTuple):
    """What the plan of a launch depends on.

    Attributes:
        multiprocessors: their number.
        shared_bytes: most shared memory that a block may have.
        arch: architecture, such as "90a".
    """

    multiprocessors: int
    shared_bytes: int
    arch: str

    def clusters(self, size: int) -> int:
        """How many clusters of `size` blocks, 1 to 8, run at once with a block on each multiprocessor."""
        return max(1, int(CLUSTER_SHARES[size] * self.multiprocessors / size))


@functools.cache
def device_limits(device_index: int) -> DeviceLimits:
    """The limits of a device.

    Raises:
        DriverError: no driver, or no such device.
        UnsupportedArchError: older than sm_80.
    """
    names = "MULTIPROCESSOR_COUNT", "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
    multiprocessors, shared_bytes = _attributes(device_index, *names)
    return DeviceLimits(multiprocessors, shared_bytes, device_arch(device_index))
