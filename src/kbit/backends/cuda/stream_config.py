"""The configurations of csrc/stream.cu: what is compiled."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format import nvfp4_layout

TOKENS = (1, 2, 4, 8, 16)  # most tokens that a compiled kernel takes
_NVFP4_TOKENS = (1, 8, 16)
GROUP_TILES = 4  # column tiles that a worker takes at a time, at least
CODED_TOKENS = 8  # most tokens that may come as NVFP4: the kernel for 16 would spill
# What is multiplied: one weight, or those of one token's experts, stacked by rows or side by side by columns.
DENSE, EXPERT_ROWS, EXPERT_COLUMNS = range(3)
MEASURED_ARCH = driver.HOPPER  # what only this one was measured with is compiled for it alone


@dataclass(frozen=True)
class Config:
    """Compile-time choices of stream.cu.

    Attributes:
        workers: most warps that split K, which bounds their registers; a launch may have fewer.
        stages: groups of tiles that a worker has in flight.
        split: whether blocks of a cluster split K.
        wide: whether a worker takes 8 column tiles at a time, instead of 4.
    """

    workers: int
    stages: int
    split: bool = False
    wide: bool = False

    @property
    def group_tiles(self) -> int:
        """Column tiles that a worker takes at a time."""
        return 8 if self.wide else GROUP_TILES

    def spec(
        self,
        bits: int,
        dtype: torch.dtype,
        tokens: int,
        nvfp4: bool = False,
        experts: int = DENSE,
        coded: bool = False,
        symmetric: bool = True,
    ) -> KernelSpec:
        """The kernel for this configuration; `nvfp4`: for NVFP4's tiles, `coded`: and activations.

        `symmetric`: for codebooks that are symmetric around 0.
        """
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
            split=self.split,
            group_tiles=self.group_tiles,
            coded=coded,
            **operands.nvfp4_config(nvfp4),
            **operands.codebook_config(bits, symmetric),
        )

    def buffers(self, tokens: int) -> int:
        """How many row tiles may have partial sums that wait to be added up."""
        return 4 if self.workers * sums_of(tokens) <= 32 else 2

    def in_holes(self, bits: int, tokens: int) -> bool:
        """Whether those sums fit in what tables of 3 and more bits leave free: half of each of 256 rows."""
        return bits in operands.HOLES and self.buffers(tokens) * self.workers * sums_of(tokens) <= 256


# Cached, because every launch looks its kernel up.
kernel_of = functools.lru_cache(maxsize=4096)(Config.spec)


def classes(nvfp4: bool) -> tuple[int, ...]:
    """Most tokens that a compiled kernel takes, ascending."""
    return _NVFP4_TOKENS if nvfp4 else TOKENS


def sums_of(tokens: int) -> int:
    """Sums of a row tile that a lane holds, in the kernel for so many tokens; kSums in stream.cuh."""
    return 2 if tokens == 1 else max(4, tokens // 2)


def configs(
    bits: int,
    tokens: int,
    shared_bytes: int,
    arch: str,
    experts: int = DENSE,
    nvfp4: bool = False,
    symmetric: bool = True,
) -> list[Config]:
    """The configurations for an architecture whose blocks may have `shared_bytes` of shared memory.

    Codebooks that are not symmetric have fewer: their kernels of 5 bits need more registers.
    """
    if shared_bytes <= operands.SMALL_MEMORY:
        return [Config(8, 1)]
    measured = arch == MEASURED_ARCH and symmetric
    dense = measured and experts == DENSE and not nvfp4
    if tokens > 8:
        return [Config(8, 2), Config(16 if measured else 12, 2)]
    # On others one stage spills, and so do 16 workers of many tokens, and 21 warps of 80 registers each.
    more = [Config(16, 2, split=True)] if dense else []
    if dense and tokens <= 4 and (bits < 5 or tokens > 1):
        more.append(Config(16 if bits < 5 else 12, 2, wide=True))  # as many as fit
    if tokens > 1:  # 12 workers have more registers than 16
        if not measured:
            return [Config(16 if tokens <= 4 else 12, 2)]
        return [Config(16, 1), Config(16, 2), Config(20, 1) if tokens <= 4 else Config(12, 2), *more]
    if experts == EXPERT_COLUMNS:  # of few row tiles, as the rows of a small layer
        return [Config(16, 1)]
    return [Config(16, 2), Config(20, 1), *more] if measured and not experts else [Config(16, 2)]


def specs(shared_bytes: int, arch: str) -> list[KernelSpec]:
    """Every kernel that `plan` may choose for such an architecture."""
    formats = [*((*code, False) for code in operands.CODES), (nvfp4_layout.BITS, True, True)]
    kernels = [(*one, tokens, DENSE) for one in formats for tokens in classes(one[2])]
    if arch == MEASURED_ARCH:
        kernels += [
            (*code, False, 1, experts) for code in operands.CODES for experts in (EXPERT_ROWS, EXPERT_COLUMNS)
        ]
    return [
        config.spec(bits, dtype, tokens, nvfp4, experts, coded, symmetric)
        for bits, symmetric, nvfp4, tokens, experts in kernels
        for config in configs(bits, tokens, shared_bytes, arch, experts, nvfp4, symmetric)
        for dtype in operands.DTYPES
        for coded in ((False, True) if nvfp4 and tokens <= CODED_TOKENS else (False,))
    ]
