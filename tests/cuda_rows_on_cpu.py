"""Run the CUDA kernels over rows on the CPU, as `cuda_on_cpu` does those of NVFP4.

Threads of a block run at once and wait for each other; blocks run one after another.
"""

from __future__ import annotations

import itertools
import re

import cuda_on_cpu
from kbit.backends.cuda.compiler import CSRC, KernelSpec

# Headers that cuda_rows_on_cpu.h stands for, and where the part of rows.cuh begins that it stands for.
KNOWN = ("common.cuh", "hopper.cuh", "matrices.cuh", "stage16.cuh", "config.h")
ACCESSES = "// ---- 16-byte global accesses"
SHARED_STEP = 1 << 16  # bytes for each variable in shared memory
MOST_VARIABLES = 6  # beside an array of a size that the launch says, which may have as much

TO, NAME, VALUE = r'[^;]*;"\s*:\s*', r"\((\w+)\)", r"\((.*?)\)"
PTX = (
    (rf'asm\("rcp\.approx{TO}"=f"{NAME}\s*:\s*"f"{VALUE}\);', r"\1 = approximate_reciprocal(\2);"),
    (
        rf'asm\("fma\.rn\.sat{TO}"=f"{NAME}\s*:\s*"f"{NAME},\s*"f"{VALUE}\);',
        r"\1 = saturated_fma(\2, \3, \3);",
    ),
    (
        rf'asm\("{{ \.reg \.pred above[^"]*"\s*:\s*"\+r"{NAME}\s*:\s*"f"{NAME},\s*'
        rf'"f"{VALUE},\s*"n"{VALUE}\);',
        r"if (\2 > \3) \1 += \4;",
    ),
    (
        rf'asm\("(max|min)\.NaN\.(b?)f16x2{TO}"\+r"{NAME}\s*:\s*"r"{VALUE}\);',
        r'\3 = \1imum_or_nan<sizeof("\2") == 2>(\3, \4);',
    ),
    (r'asm volatile\("stmatrix.*?"memory"\);', "store_squares(to, a);"),
    (r'asm volatile\("st\.shared\.v2\.f32.*?"memory"\);', "into_shared(to, a); into_shared(to + 4, b);"),
    (r'asm volatile\("st\.volatile\.global\.v4.*?"memory"\);', "*to = piece;"),
    (r'asm volatile\("ld\.volatile\.global\.v4.*?"memory"\);', "piece = *at;"),
    (r'asm volatile\("mov\.u64 %0, %%globaltimer.*?\);', "static u64 ticks = 0; now = ticks += 1000000000;"),
    (r'asm volatile\("(?:prefetch|cp\.async\.wait_all).*?\);\n', "\n"),
    (r"load_shared_element<", "shared_element<"),
    (
        r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];",
        rf"\1* const \2 = reinterpret_cast<\1*>(block_memory() + {MOST_VARIABLES * SHARED_STEP});",
    ),
    (r"#pragma (once|unroll.*)", ""),
)


def translated(name: str, seen: set[str]) -> str:
    """A source and what it includes, without PTX."""
    if name in seen or name in KNOWN:
        return ""
    seen.add(name)
    text = (CSRC / name).read_text()
    if name == "rows.cuh":
        text = text[: text.index(ACCESSES)].replace("typedef long long i64;", "")
        text = re.sub(r"constexpr (int kBlock|u32 kAll) = [^;]*;", "", text)
    for pattern, replacement in PTX:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL if pattern.startswith("asm") else 0)
    places = itertools.count(0, SHARED_STEP)
    text = re.sub(
        r"__shared__ (?:alignas\(\d+\) )?(\w+) (\w+)(\[[^;]*\])?;",
        lambda found: _placed(found, next(places)),
        text,
    )
    text = re.sub(r'#include "([^"]+)"', lambda include: translated(include[1], seen), text)
    assert "asm" not in text, f"{name} has PTX that is not known: {re.findall('.*asm.*', text)}"
    return text


def _placed(variable: re.Match[str], place: int) -> str:
    kind, name, is_array = variable.groups()
    if is_array:
        return f"{kind}* const {name} = reinterpret_cast<{kind}*>(block_memory() + {place});"
    return f"{kind}& {name} = *reinterpret_cast<{kind}*>(block_memory() + {place});"


def host_source(spec: KernelSpec) -> str:
    """C++ with a function `run`, of a kernel over rows."""
    source = translated(spec.source, set())
    return cuda_on_cpu.with_run(spec, source, "cuda_rows_on_cpu.h", True, 2 * MOST_VARIABLES * SHARED_STEP)
