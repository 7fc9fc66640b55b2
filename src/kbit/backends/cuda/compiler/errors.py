"""What can go wrong while compiling; the package's docstring says which means what."""

from __future__ import annotations

from kbit.format.errors import KbitError

# Of the packages that torch's CUDA build brings along and others lack.
INSTALL = "pip install cuda-bindings nvidia-cuda-nvrtc"


class CompilerUnavailableError(KbitError):
    """This machine lacks the compiler that was asked for; nothing was compiled."""


class UnsupportedArchError(KbitError):
    """The architecture is not one that kbit's kernels, or this compiler's version, can be compiled for."""


class KbitCompileError(KbitError):
    """The compiler refused a kernel: a defect of kbit or of its options, not of the caller's input.

    Attributes:
        kernel: name of the spec, such as "stream[bits=4,bf16=0]".
        arch: such as "90a".
        options: the compiler's command line.
        log: all that the compiler said, its lines beginning "stream.cu(12): error:".
    """

    def __init__(self, kernel: str, arch: str, compiler: str, options: tuple[str, ...], log: str) -> None:
        self.kernel, self.arch, self.compiler, self.options, self.log = kernel, arch, compiler, options, log
        reason = log.strip() or "(it gave no reason)"
        super().__init__(
            f"{kernel} does not compile for sm_{arch} with {compiler}:\n{reason}\n"
            f"Options: {' '.join(options)}"
        )

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # An exception is pickled with its message alone, which __init__ would not take.
        return type(self), (self.kernel, self.arch, self.compiler, self.options, self.log)
