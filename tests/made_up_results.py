"""Result files of tasks and of NVFP4, as their benchmarks write them, with made-up numbers."""

from __future__ import annotations

from typing import Any

from kbit.bench import attention, chat, conversions, generate, nvfp4, quantize, result_files, serve, train


def training() -> dict[str, Any]:
    arms = [
        train.ArmResult("bf16", 16 * 10**9, 10**8, 40 * 10**9, 200.0, 0.01, 2.5, 2.25),
        train.ArmResult("kbit k=4", 4 * 10**9, 10**8, None, 160.0, 0.01, 2.5, 2.25),
    ]
    return {"model": "big", "layers": 2, "plan": vars(train.Plan()), "arms": train.as_json(arms)}


def serving() -> dict[str, Any]:
    level = serve.Level(8, 32, 4.0, 2048, [0.5, 0.75, 1.0], ["refused <here>"], None, 9 * 10**9)
    levels = serve.as_json([level, serve.Level(32, 0)])
    return {"plan": {}, "options": [], "models": {"bf16": levels, "kbit-4": levels}}


def generating() -> dict[str, Any]:
    rows = [
        generate.Row(arm, way, 1.5, 0.25, speed, None if speed else "it keeps <no> cache")
        for arm, speed in (("kbit k=4", 40.0), ("bf16", 20.0), ("other", None))
        for way in (generate.EAGER, generate.GRAPHS)
    ]
    plan = {"prompt": 8, "new_tokens": 8}
    return {"model": "big", "layers": 2, "plan": plan, "rows": result_files.as_json(rows)}


def chatting() -> dict[str, Any]:
    rows = [
        chat.Row(arm, way, turn, 8 * turn, wait, speed)
        for arm, speed in (("kbit k=4", 40.0), ("bf16", None))
        for way, wait in ((chat.WHOLE, 0.5), (chat.KEPT, 0.25))
        for turn in (1, 2)
    ]
    plan = vars(chat.Plan())
    return {"model": "big", "layers": 2, "plan": plan, "machine": {}, "rows": result_files.as_json(rows)}


def quantizing() -> dict[str, Any]:
    runs = quantize.as_json([quantize.Run(2, ("cuda",), 8 * 10**9, 16 * 10**9, 4 * 10**9, 16.0)])
    return {"model": "big", "layers": None, "policy": {}, "runs": runs}


def nvfp4_parts() -> dict[str, Any]:
    rows = [
        nvfp4.NVFP4Row(part, "a problem", 8, arm, us, 0.01, 10**6, 8, 0)
        for part in ("quantize", "gemm", "layer", "kernels")
        for arm, us in ((nvfp4.CUBLAS, 20.0), ("tc", 16.0))
    ]
    return {"read_bandwidth_gb_s": 4500.0, "dtype": "bf16", "rows": nvfp4.as_json(rows)}


def alone() -> dict[str, Any]:
    rows = [conversions.ConversionRow("quantize", "l8b", 4096, 14336, 4, "fp16", 40.0, 0.01, 3600.0)]
    return {"read_bandwidth_gb_s": 4500.0, "row_kernels": conversions.as_json(rows, 4500.0)}


def attending() -> dict[str, Any]:
    rows = [
        attention.AttentionRow("big", 4, 100, 128, arm, us, 0.01, 10**7)
        for arm, us in ((attention.TORCH, 20.0), (attention.DISPATCHED, 10.0))
    ]
    return {"read_bandwidth_gb_s": 4500.0, "dtype": "bf16", "rows": attention.as_json(rows)}


FILES = {
    "attention": attending,
    "train": training,
    "generate": generating,
    "chat": chatting,
    "serve": serving,
    "quantize": quantizing,
    "nvfp4": nvfp4_parts,
    "alone": alone,
}
