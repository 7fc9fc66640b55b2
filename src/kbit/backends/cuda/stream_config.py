"""The configurations of csrc/stream.cu: what is compiled."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import SUPPORTED_BITS

TOKENS = (1, 8, 16)  # the kernel is compiled for at most so many
# One weight, or those of the experts of a token: their rows above, or their columns beside each other.
DENSE, EXPERT_ROWS, EXPERT_COLUMNS = range(3)
MEASURED_ARCH = "90a"  # which alone has the latter, and some launches of the former


@dataclass(frozen=True)
class Config:
    """Compile-time choices of stream.cu.

    Attributes:
        workers: most warps that split K; a launch may have fewer. Their number bounds their registers.
        stages: groups of four tiles that a worker has in flight.
        table_bytes: of the look-up table, see decode.cuh.
    """

    workers: int
    stages: int
    table_bytes: int = operands.TABLE_BYTES

    def spec(
        self, bits: int, dtype: torch.dtype, tokens: int, nvfp4: bool = False, experts: int = DENSE
    ) -> KernelSpec:
        """The kernel for this configuration; `nvfp4`: for NVFP4's tiles."""
        return KernelSpec.make(
            "stream.cu",
            bits=bits,
            bf16=dtype == torch.bfloat16,
            tokens=tokens,
            workers=self.workers,
            stages=self.stages,
            experts=experts,
            buffers=self.buffers(tokens),
            in_holes=self.in_holes(bits, tokens),
            table_bytes=self.table_bytes,
            **layout.nvfp4_config(nvfp4),
        )

    def buffers(self, tokens: int) -> int:
        """How many row tiles' sums of the workers may wait to be added up."""
        return 4 if self.workers * sums_of(tokens) <= 32 else 2

    def in_holes(self, bits: int, tokens: int) -> bool:
        """Whether those sums fit in what the table of 3 and 4 bits leaves free: half of each of 256 rows."""
        return bits in (3, 4) and self.buffers(tokens) * self.workers * sums_of(tokens) <= 256


# As a launch looks it up.
kernel_of = functools.lru_cache(maxsize=4096)(Config.spec)


def sums_of(tokens: int) -> int:
    """Sums that a lane has of a row tile, in the kernel for so many tokens; as kSums in stream.cuh."""
    return 2 if tokens == 1 else tokens // 2


def configs(bits: int, tokens: int, shared_bytes: int, arch: str, experts: int = DENSE) -> list[Config]:
    """What a multiprocessor of an architecture, with so much shared memory a block, may be asked to run."""
    if shared_bytes <= operands.SMALL_MEMORY:
        return [Config(8, 1, operands.LEVELS_BYTES if bits == 5 else operands.TABLE_BYTES)]
    if bits == 5:  # either table leaves room for one stage of many warps
        wide = shared_bytes > operands.WIDE_TABLE_MEMORY
        table_bytes = operands.WIDE_TABLE_BYTES if wide else operands.TABLE_BYTES
        return [Config(8, 2, table_bytes), Config(16, 1, table_bytes)]
    if tokens > 8:
        return [Config(8, 2), Config(16, 2)]
    # On others one stage spills, and so do 21 warps of 80 registers each.
    measured = arch == MEASURED_ARCH
    if tokens > 1:  # 12 workers have more registers than 16
        stages = (1, 2) if measured else (2,)
        return [Config(workers, count) for workers in (12, 16) for count in stages]
    if experts == EXPERT_COLUMNS:  # of few row tiles, as the rows of a small layer
        return [Config(16, 1)]
    return [Config(16, 2), Config(20, 1)] if measured and not experts else [Config(16, 2)]


def specs(shared_bytes: int, arch: str) -> list[KernelSpec]:
    """Every kernel that `plan` may choose on such a multiprocessor."""
    formats = [*((bits, False) for bits in SUPPORTED_BITS), (layout.NVFP4_BITS, True)]
    kernels = [(*one, tokens, DENSE) for one in formats for tokens in TOKENS]
    if arch == MEASURED_ARCH:
        kernels += [
            (bits, False, 1, experts) for bits in SUPPORTED_BITS for experts in (EXPERT_ROWS, EXPERT_COLUMNS)
        ]
    return [
        config.spec(bits, dtype, tokens, nvfp4, experts)
        for bits, nvfp4, tokens, experts in kernels
        for config in configs(bits, tokens, shared_bytes, arch, experts)
        for dtype in operands.DTYPES
    ]
