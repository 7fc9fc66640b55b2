"""NVFP4: the quantizer, products, and layers of experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kbit.bench.report import markup
from kbit.bench.report.markup import Row
from kbit.bench.report.results import Result
from kbit.bench.report.sections import Section

# Parts of `kbit bench nvfp4`, what they are, and what their rows count.
_PARTS = {
    "quantize": ("Quantizing activations", "rows"),
    "gemm": ("Products", "M"),
    "layer": ("Layers of experts, end to end", "T"),
    "kernels": ("Layers of experts, kernel by kernel", "T"),
    "occupancy": ("Quantizing activations, by how rows are dealt to threads", "rows"),
    "tiles": ("Products, by tile and split of K", "M"),
}


def _nvfp4(results: Sequence[Result]) -> str:
    parts = []
    for result in results:
        bandwidth = float(result.data["read_bandwidth_gb_s"])
        parts.append(markup.heading(f"{result.device}, {result.data['dtype']}, {result.name}"))
        for part, (title, unit) in _PARTS.items():
            items = [item for item in result.data["rows"] if item["part"] == part]
            for problem in dict.fromkeys(item["problem"] for item in items):
                here = [item for item in items if item["problem"] == problem]
                headers = [unit, "arm", "us", "spread", "GB/s", "% of read", "quantized", "copied", "vs bf16"]
                caption = f"{title}: {problem}"
                parts.append(markup.table(headers, _measured(here, bandwidth), caption, left=2))
    return "".join(parts)


def _measured(items: Sequence[Mapping[str, Any]], bandwidth: float) -> Iterator[Row]:
    previous = items[0]["rows"]
    for item in items:
        first, previous = item["rows"] != previous, item["rows"]
        cells: list[str | markup.Cell] = [
            str(item["rows"]),
            item["arm"],
            *markup.speed(item, bandwidth),
            str(item["quantized_rows"]),
            str(item["copied_rows"]),
            markup.MISSING if item["vs_bf16"] is None else markup.heat(item["vs_bf16"]),
        ]
        yield Row(cells, first=first)


SECTIONS = (
    Section(
        "nvfp4",
        "NVFP4",
        "4-bit floats for weights and activations under three contracts of addition, beside bf16 cuBLAS and "
        "dequantizing in front of it; rows that the quantizer took and rows that were copied.",
        ("nvfp4",),
        "kbit bench nvfp4 --json {folder}/nvfp4.json",
        _nvfp4,
    ),
)
