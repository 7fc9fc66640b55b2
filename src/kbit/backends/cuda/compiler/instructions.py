"""CUDA text that is written by a program: instructions whose operands are too many to type."""

from __future__ import annotations

WGMMA_HEADER = "wgmma_instruction.h"


def wgmma_header(tokens: int, bf16: bool) -> str:
    """Products of a tile of 64 rows and `tokens` columns, asynchronous.

    `multiply_add(d, a, b)`: d += a b; `multiply_onto(d, a, b, adds)`: the same, or d = a b.
    d: float[tokens / 2], the accumulators; a: four registers of a 64 x 16 operand; b: a shared-memory
    descriptor of a 16 x `tokens` operand.
    """
    count = tokens // 2
    accumulators = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    dtype = "bf16" if bf16 else "f16"
    product = (
        f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{dtype}.{dtype} {{{accumulators}}}, {{{a}}}, "
        f"%{count + 4}"
    )
    return f"""#pragma once
__device__ __forceinline__ void multiply_add(float (&d)[{count}], const unsigned (&a)[4],
                                             unsigned long long b) {{
    asm volatile(
        "{product}, 1, 1, 1, 0;"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
__device__ __forceinline__ void multiply_onto(float (&d)[{count}], const unsigned (&a)[4],
                                              unsigned long long b, bool adds) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; {product}, p, 1, 1, 0; }}"
        : {operands}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(adds)));
}}
"""
