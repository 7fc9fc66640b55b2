"""Rows and result files of `kbit bench kernels` with made-up times."""

from __future__ import annotations

import json
from pathlib import Path

from kbit.bench import kernel_rows, kernels, shapes
from kbit.bench.kernel_rows import BASELINE, OURS, PEER, KernelRow

BANDWIDTH = 4500.0


def made_up(
    shape: str, rows: int, kernel: str, us: float, bits: int | None = 4, kind: str = OURS, dtype: str = "fp16"
) -> KernelRow:
    (layer,) = shapes.select([shape])
    width = 16 if bits is None else bits + 0.25
    return KernelRow(
        model=layer.model,
        shape=shape,
        in_features=layer.in_features,
        out_features=layer.out_features,
        count=layer.count,
        rows=rows,
        bits=bits,
        dtype=dtype,
        kernel=kernel,
        kind=kind,
        us=us,
        spread=0.02,
        copies=4,
        weight_bytes=int(layer.weights * width / 8),
    )


def problem(
    shape: str, rows: int, base: float, ours: float, bits: int = 4, dtype: str = "fp16"
) -> list[KernelRow]:
    """A baseline, the dispatched kernel, a slower one of ours and a faster peer."""
    return [
        made_up(shape, rows, kernels.CUBLAS, base, None, BASELINE, dtype),
        made_up(shape, rows, "kbit", ours, bits, OURS, dtype),
        made_up(shape, rows, kernels.DEQUANTIZE, 3 * ours, bits, OURS, dtype),
        made_up(shape, rows, "humming", 0.5 * ours, bits, PEER, dtype),
    ]


def result_file(path: Path, rows: list[KernelRow]) -> Path:
    """Write what `--json` would."""
    header = {"machine": {"gpu": "made up"}, "read_bandwidth_gb_s": BANDWIDTH}
    path.write_text(json.dumps(header | {"rows": kernel_rows.as_json(rows)}))
    return path
