"""Load compiled kernels on a device and launch them, at a cost of about a microsecond of Python.

    kernel = load(spec, device.index, "QQi")  # compiled or cached, loaded, ready for capture
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    kernel.launch((blocks, 1, 1), 256, (x.data_ptr(), y.data_ptr(), count), stream=stream)

Launching calls the driver by ctypes, the launch's structure and arguments packed into one prepared buffer by
one `struct.pack_into`. Nothing here synchronises or waits.

Which exception means what: `DriverError`, the driver is missing, too old, or refused a call; those of
`kbit.backends.cuda.compiler`, the kernel could not be compiled; plain `ValueError`, a wrong call of `launch`.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kbit.backends.cuda import driver
from kbit.backends.cuda.compiler import CSRC, CompiledKernel, KernelSpec
from kbit.backends.cuda.driver import DriverError
from kbit.backends.cuda.libraries import library_kernel

# Static and dynamic shared memory that a block may have without asking.
FREE_SHARED_BYTES = 48 * 1024
# Blocks of a cluster: what every GPU with clusters runs, and what some do if asked.
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16
# Of CUlaunchConfig: grid and block (6 x u32), shared bytes, stream; then the attributes' address and number.
LAUNCH_FORMAT = "7I4xQ"
ATTRIBUTES_FORMAT = "QI4x"
ATTRIBUTE_BYTES = 72
# One kernel argument in 8 aligned bytes, or a tensor map in 128.
ARGUMENT_FORMATS = {"Q": "Q", "i": "i4x", "f": "f4x", "T": "128s"}


class Kernel:
    """A kernel on one device; made by `load`, usable from several threads at once.

    Attributes:
        compiled: its registers, its log, and so on.
        device_index: as torch counts devices.
    """

    def __init__(self, compiled: CompiledKernel, device_index: int, format: str, function: int) -> None:
        self.compiled, self.device_index, self.format = compiled, device_index, format
        self._function = function
        self._hopper = driver.since_hopper(compiled.arch)
        self._free_bytes = FREE_SHARED_BYTES - compiled.shared_bytes
        self._threads = _PerThread()
        self._takes: dict[tuple[int, int, int], bool] = {}
        arguments = "".join(ARGUMENT_FORMATS[letter] for letter in format)
        self._pack = struct.Struct(f"<{arguments}{LAUNCH_FORMAT}").pack_into
        self._call = driver.driver_library().cuLaunchKernelEx
        self._lock = threading.Lock()

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int,
        args: tuple[int | float | bytes, ...],
        *,
        stream: int,
        smem: int = 0,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        """Queue the kernel. The current device must be the kernel's where `stream` is 0, the default stream.

        Args:
            grid: numbers of blocks.
            block: threads of each.
            args: the kernel's, as `format` given to `load` lists them; tensors as their `data_ptr()`.
            stream: the handle of a CUDA stream of the device.
            smem: bytes of dynamic shared memory.
            pdl: may start while the previous kernel on the stream still runs, up to where this one waits for
                it (griddepcontrol.wait). Without effect on GPUs before Hopper.
            cluster: blocks in a cluster, along x; more than 8 where `takes_cluster` says so.

        Raises:
            ValueError: the arguments do not fit the format; no cluster of that size; too much shared memory.
            DriverError: the driver refused the launch.
        """
        if smem > self._free_bytes:
            self._allow(smem)
        try:
            buffer, config, pointers = self._threads.calls[2 * cluster + pdl]
        except KeyError:
            buffer, config, pointers = self._prepare(pdl, cluster)
        try:
            self._pack(buffer, 0, *args, *grid, block, 1, 1, smem, stream)
        except struct.error as error:
            raise self._argument_error(args, error) from None
        code = self._call(config, self._function, pointers, None)
        if code and self._adopt_context():
            code = self._call(config, self._function, pointers, None)
        if code:
            shape = f"grid {grid}, block {block}, {smem} bytes of shared memory, pdl {pdl}, cluster {cluster}"
            raise DriverError(
                f"{self.compiled.spec.name}: launch refused, {driver.error_text(code)}; {shape}."
            )

    def takes_cluster(self, cluster: int, block: int, smem: int) -> bool:
        """Whether the device runs clusters of so many blocks, which the kernel asks for if need be.

        Args:
            cluster: 2 to 16 blocks.
            block: threads of each.
            smem: bytes of dynamic shared memory of each.
        """
        key = cluster, block, smem
        if key not in self._takes:
            self._takes[key] = self._most_clusters(*key) > 0
        return self._takes[key]

    def _most_clusters(self, cluster: int, block: int, smem: int) -> int:
        """How many clusters run at once; 0 if none of that size can."""
        if not self._hopper:
            return 0
        if smem > self._free_bytes:
            self._allow(smem)
        cuda, library = driver.api(), driver.driver_library()
        with self._lock, driver.current(self.device_index):
            if cluster > PORTABLE_CLUSTER:
                kind = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
                (code,) = cuda.cuFuncSetAttribute(cuda.CUfunction(self._function), kind, 1)
                if int(code):
                    return 0
            buffer, config, _ = self._prepare(False, cluster)
            sizes = cluster, 1, 1, block, 1, 1, smem, 0
            struct.pack_into(f"<{LAUNCH_FORMAT}", buffer, config - ctypes.addressof(buffer), *sizes)
            count = ctypes.c_int(0)
            code = library.cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, config)
            return 0 if code else count.value

    def _prepare(self, pdl: bool, cluster: int) -> tuple[Any, int, int]:
        """A thread's buffer for one kind of launch; addresses of its CUlaunchConfig and argument pointers."""
        cuda = driver.api()
        ids = cuda.CUlaunchAttributeID
        if cluster != 1 and not (self._hopper and 1 <= cluster <= MAX_CLUSTER):
            raise ValueError(
                f"{self.compiled.spec.name}: clusters have 1 to {MAX_CLUSTER} blocks, and more than one from "
                f"sm_90 on; got {cluster} on sm_{self.compiled.arch}."
            )
        attributes = []
        if pdl and self._hopper:
            attributes.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, (1, 0, 0)))
        if cluster > 1:
            attributes.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, (cluster, 1, 1)))
        sizes = [struct.calcsize(f"<{ARGUMENT_FORMATS[letter]}") for letter in self.format]
        config_at = sum(sizes)
        tail_at = config_at + struct.calcsize(f"<{LAUNCH_FORMAT}")
        attributes_at = tail_at + struct.calcsize(f"<{ATTRIBUTES_FORMAT}")
        pointers_at = attributes_at + ATTRIBUTE_BYTES * len(attributes)
        buffer = (ctypes.c_uint64 * ((pointers_at + 8 * len(self.format)) // 8))()
        base = ctypes.addressof(buffer)
        struct.pack_into(f"<{ATTRIBUTES_FORMAT}", buffer, tail_at, base + attributes_at, len(attributes))
        for index, (name, value) in enumerate(attributes):
            struct.pack_into("<I4x3I", buffer, attributes_at + ATTRIBUTE_BYTES * index, int(name), *value)
        for index in range(len(self.format)):
            struct.pack_into("<Q", buffer, pointers_at + 8 * index, base + sum(sizes[:index]))
        call = buffer, base + config_at, base + pointers_at
        self._threads.calls[2 * cluster + pdl] = call
        return call

    def _allow(self, smem: int) -> None:
        """Ask for more dynamic shared memory than a block has by default; the largest request stays."""
        cuda = driver.api()
        kinds = cuda.CUfunction_attribute
        with self._lock, driver.current(self.device_index):
            if smem <= self._free_bytes:
                return
            function = cuda.CUfunction(self._function)
            limit = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (code,) = cuda.cuFuncSetAttribute(function, limit, smem)
            if int(code):
                raise ValueError(
                    f"{self.compiled.spec.name}: a block cannot have {smem} bytes of dynamic shared memory "
                    f"beside {self.compiled.shared_bytes} static ones on device {self.device_index}: "
                    f"{driver.error_text(code)}."
                )
            carveout = kinds.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.check(cuda.cuFuncSetAttribute(function, carveout, 100), "cuFuncSetAttribute")
            self._free_bytes = smem

    def _adopt_context(self) -> bool:
        """Make the device current in a thread that has no current device yet, as the CUDA runtime would."""
        cuda = driver.api()
        if int(driver.check(cuda.cuCtxGetCurrent(), "cuCtxGetCurrent")):
            return False
        driver.check(cuda.cuCtxSetCurrent(driver.primary_context(self.device_index)), "cuCtxSetCurrent")
        return True

    def _argument_error(self, args: tuple[int | float | bytes, ...], error: struct.error) -> ValueError:
        name, count = self.compiled.spec.name, len(self.format)
        if len(args) != count:
            return ValueError(f"{name} takes {count} arguments ({self.format}), got {len(args)}.")
        return ValueError(
            f"{name}: {args} does not fit the arguments' types {self.format}, or the grid: {error}."
        )


class _PerThread(threading.local):
    """Buffers of one thread: two threads may launch the same kernel at once."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[Any, int, int]] = {}


_kernels: dict[tuple[KernelSpec, int, str, Path], Kernel] = {}
_locks: dict[tuple[KernelSpec, Path], threading.Lock] = {}


def load(spec: KernelSpec, device_index: int, format: str, *, csrc: Path = CSRC) -> Kernel:
    """The kernel on a device: compiled at its first use, then loaded, then the same object for every caller.

    The code is on the device when this returns, so launches may be captured in a CUDA graph; loading while a
    stream captures is fine too.

    Args:
        spec: which kernel.
        device_index: as torch counts devices.
        format: one letter per argument: Q pointer or 64-bit integer, i int, f float, T tensor map (bytes).
        csrc: folder of the sources.

    Raises:
        DriverError: there is no driver or no such device, or the driver is older than the compiler.
        KbitError: the kernel cannot be compiled; see `kbit.backends.cuda.compiler`.
        ValueError: another letter in `format`.
    """
    key = (spec, device_index, format, csrc)
    kernel = _kernels.get(key)
    if kernel is not None:
        return kernel
    unknown = set(format) - set(ARGUMENT_FORMATS)
    if unknown:
        raise ValueError(f"{spec.name}: format {format!r} may hold {', '.join(ARGUMENT_FORMATS)} only.")
    # One lock per kernel: threads that need different ones compile at the same time.
    with _locks.setdefault((spec, csrc), threading.Lock()):
        if key not in _kernels:
            compiled, handle = library_kernel(spec, driver.device_arch(device_index), csrc)
            with driver.current(device_index), driver.lenient_capture():
                # The function of this device, not the library's kernel: getting it puts the code on the
                # device now, and a launch with another device current is an error, not a run there.
                function = driver.check(driver.api().cuKernelGetFunction(handle), "cuKernelGetFunction")
            _kernels[key] = Kernel(compiled, device_index, format, int(function))
    return _kernels[key]


class Prepared(NamedTuple):
    """A launch of which all but the arguments is decided, with programmatic dependent launch.

    Attributes:
        device_index: as torch counts devices.
        kernel: what is launched.
        grid: numbers of blocks.
        block: threads of each.
        smem: bytes of dynamic shared memory.
        cluster: blocks in a cluster, along x.
    """

    device_index: int
    kernel: Kernel
    grid: tuple[int, int, int]
    block: int
    smem: int = 0
    cluster: int = 1

    def launch(self, args: tuple[int | float | bytes, ...]) -> None:
        """See `launch_on`."""
        index, kernel, grid, block, smem, cluster = self
        launch_on(index, kernel, grid, block, args, smem=smem, pdl=True, cluster=cluster)


def launch_on(
    device_index: int,
    kernel: Kernel,
    grid: tuple[int, int, int],
    block: int,
    args: tuple[int | float | bytes, ...],
    *,
    smem: int = 0,
    pdl: bool = False,
    cluster: int = 1,
) -> None:
    """Launch on torch's current stream of a device, whichever device is current; see `Kernel.launch`."""
    stream = torch._C._cuda_getCurrentRawStream(device_index)
    if stream or torch._C._cuda_getDevice() == device_index:
        kernel.launch(grid, block, args, stream=stream, smem=smem, pdl=pdl, cluster=cluster)
        return
    with torch.cuda.device(device_index):  # stream 0 is the current device's
        kernel.launch(grid, block, args, stream=stream, smem=smem, pdl=pdl, cluster=cluster)
