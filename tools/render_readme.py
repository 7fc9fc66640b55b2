"""Put the figures of benchmarks/results/ into README.md, between its markers; `make readme` runs it.

A marker pair `<!-- NAME -->` ... `<!-- /NAME -->` is filled by the function of that name. `--check` only says
whether README.md is up to date.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / name).read_text())


def markdown(headers: list[str], rows: Iterable[list[str]]) -> str:
    """A table, its first column to the left, the others to the right."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (headers, rule, *rows))


def _linear(result: dict[str, Any], shape: str) -> dict[tuple[int, str, int | None], dict[str, Any]]:
    rows = [row for row in result["linear"] if row["shape"] == shape]
    return {(row["rows"], row["kernel"], row["bits"]): row for row in rows}


def claim() -> str:
    """The number in the first sentence: decoding at 4 bits against bfloat16, one token."""
    row = _linear(load("cpu.json"), "llama-8b up")[1, "avx512", 4]
    return f"{row['vs_bfloat16']:.1f}"


def cpu() -> str:
    """The large layer: every kernel at every number of tokens."""
    result = load("cpu.json")
    rows = _linear(result, "llama-8b up")
    counts = sorted({count for count, _, _ in rows})
    kernels = list(dict.fromkeys((kernel, bits) for _, kernel, bits in rows))
    body = []
    for kernel, bits in kernels:
        cells = [f"{kernel}, k={bits}" if bits else kernel]
        for count in counts:
            row = rows[count, kernel, bits]
            cells.append(f"{row['ms']:.2f} ({row['vs_bfloat16']:.2f})")
        body.append(cells)
    about = result["machine"]
    caption = (
        f"4096 → 14336, bfloat16 activations, milliseconds (in brackets: times as fast as torch's bfloat16). "
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, "
        f"{result['read_bandwidth_gb_s']:.0f} GB/s read bandwidth."
    )
    return caption + "\n\n" + markdown(["kernel", *(f"M={count}" for count in counts)], body)


def quantizers() -> str:
    """Quantizing speed."""
    rows = {(row["isa"], row["bits"], row["search"]): row for row in load("cpu.json")["quantize"]}
    isas = list(dict.fromkeys(isa for isa, _, _ in rows))
    body = [
        [f"{isa}, {'search' if search else 'plain'}"]
        + [f"{rows[isa, bits, search]['million_weights_s']:.0f}" for bits in (2, 3, 4, 5)]
        for isa in isas
        for search in (False, True)
    ]
    return markdown(["million weights a second", "k=2", "k=3", "k=4", "k=5"], body)


def quality() -> str:
    """What each width costs on a model that never was quantized."""
    result = load("quality-tiny-moe.json")
    body = []
    for row in result["rows"]:
        name = "unquantized" if row["bits"] is None else f"k={row['bits']}, {row['method']}"
        nmse = "" if row.get("nmse") is None else f"{row['nmse']:.5f}"
        divergence = "" if row["kl_divergence"] is None else f"{row['kl_divergence']:.4f}"
        body.append([name, nmse, f"{row['perplexity']:.3f}", divergence])
    tokens = result["rows"][0]["tokens"]
    caption = (
        f"A 41 M parameter mixture-of-experts model, attention and experts quantized, {tokens:,} held-out "
        f"tokens in windows of {result['window']}."
    )
    return caption + "\n\n" + markdown(["", "squared error", "perplexity", "KL divergence"], body)


def demo() -> str:
    """What `make demo` printed."""
    result = load("demo.json")
    body = [
        [
            row["model"],
            row["quantized"],
            f"{row['bits_per_weight']:.2f}",
            f"{row['megabytes']:.0f}",
            f"{row['perplexity']:.2f}",
            "" if row["kl_divergence"] is None else f"{row['kl_divergence']:.3f}",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in result["rows"]
    ]
    headers = ["model", "quantized", "bits/weight", "MB", "perplexity", "KL divergence", "tokens/s"]
    return markdown(headers, body)


SECTIONS: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (claim, cpu, quantizers, quality, demo)
}


def render(text: str) -> str:
    """Text with every marked section filled."""
    for name, function in SECTIONS.items():
        pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- /{name} -->)", re.S)
        if pattern.search(text):
            content = function()
            block = f"\n{content}\n" if "\n" in content else content
            text = pattern.sub(lambda match, block=block: match[1] + block + match[2], text)
    return text


def main() -> int:
    """Write README.md, or compare with `--check`."""
    old = README.read_text()
    new = render(old)
    if "--check" in sys.argv:
        if new != old:
            print("README.md does not show the figures of benchmarks/results/. Run: make readme")
        return int(new != old)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
