"""CUDA text that is written by a program: instructions whose operands are too many to type."""

from __future__ import annotations

WGMMA_HEADER = "wgmma_instruction.h"


def wgmma_header(tokens: int, bf16: bool) -> str:
    """`multiply_onto(d, a, b, adds)`: d += a b, or d = a b, of 64 rows by `tokens` columns, asynchronously.

    d: the accumulators, float[tokens / 2] or more; a: four registers of a 64 x 16 operand; b: a shared-memory
    descriptor of a 16 x `tokens` operand.
    """
    count = tokens // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    dtype = "bf16" if bf16 else "f16"
    return f"""#pragma once
template <int COUNT>
__device__ __forceinline__ void multiply_onto(float (&d)[COUNT], const unsigned (&a)[4],
                                              unsigned long long b, bool adds) {{
    static_assert(COUNT >= {count});
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
        "wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{dtype}.{dtype} {{{accumulators}}}, {{{a}}}, "
        "%{count + 4}, p, 1, 1, 0; }}"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}}
"""
