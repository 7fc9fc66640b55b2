"""`kbit eval`: perplexity and KL divergence against the unquantized model on a text."""

from __future__ import annotations

import copy
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kbit.cli.generate import load_model

if TYPE_CHECKING:
    import torch

console = Console()
SHIPPED_TEXT = "text.txt"


def read_text(file: Path | None) -> str:
    """The text to score on: a file's, or the public-domain one that ships with kbit.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    if file is None:
        return (resources.files("kbit") / "data" / SHIPPED_TEXT).read_text(encoding="utf-8")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error}). Convert it first.") from None


def encode_windows(folder: Path, text: str, size: int, max_tokens: int | None) -> torch.Tensor:
    """Token ids of a text, int64 [n, size], by the tokenizer of a model folder."""
    from transformers import AutoTokenizer

    from kbit.bench.quality import windows

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    return windows(ids, size, max_tokens)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Model folder: quantized, or not with --bits.")],
    reference: Annotated[Path | None, typer.Option(help="The unquantized model's folder.")] = None,
    bits: Annotated[
        str | None, typer.Option(help="Quantize FOLDER in memory to these widths, such as 2,3,4,5.")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="With --bits: plain absmax beside search.")] = False,
    embedding_bits: Annotated[int | None, typer.Option(help="With --bits: embeddings and head too.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text; a shipped one by default.")] = None,
    window: Annotated[int, typer.Option(min=2, help="Tokens per window.")] = 512,
    max_tokens: Annotated[int | None, typer.Option(min=2, help="Score at most so many.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Perplexity and KL divergence, teacher forced, computed in float32."""
    if bits is None:
        rows = _saved(folder, reference, text, window, max_tokens)
    else:
        rows = _in_memory(folder, _widths(bits), plain, embedding_bits, text, window, max_tokens)
    console.print(_table(rows, window))
    if json_file is not None:
        from kbit.bench import machine

        about = {"machine": machine.describe(), "model": folder.name, "window": window, "rows": rows}
        json_file.write_text(json.dumps(about, indent=1) + "\n")


def _widths(bits: str) -> list[int]:
    try:
        return [int(part) for part in bits.split(",")]
    except ValueError:
        raise ValueError(f"--bits takes widths such as 4 or 2,3,4,5, got {bits!r}.") from None


def _saved(
    folder: Path, reference: Path | None, text: Path | None, window: int, max_tokens: int | None
) -> list[dict[str, Any]]:
    """Rows for a model as it is on disk, and for its reference where one is given."""
    ids = encode_windows(folder, read_text(text), window, max_tokens)
    models = {} if reference is None else {reference.name: load_model(reference, "float32")}
    base = next(iter(models.values()), None)
    models[folder.name] = load_model(folder, "float32")
    return [
        _score(model, name, ids, None if model is base else base, {"bits": None, "method": "saved"})
        for name, model in models.items()
    ]


def _in_memory(
    folder: Path,
    widths: list[int],
    plain: bool,
    embedding_bits: int | None,
    text: Path | None,
    window: int,
    max_tokens: int | None,
) -> list[dict[str, Any]]:
    """Rows for the unquantized model, and for each width and quantizer made from it."""
    from kbit import quantize_model
    from kbit.format import QuantizationPolicy

    policies = [
        QuantizationPolicy(bits=width, search=search, embedding_bits=embedding_bits)
        for width in widths
        for search in ((False, True) if plain else (True,))
    ]
    ids = encode_windows(folder, read_text(text), window, max_tokens)
    base = load_model(folder, "float32")
    rows = [_score(base, folder.name, ids, None, {"bits": None, "method": "unquantized"})]
    for policy in policies:
        method = "search" if policy.search else "plain"
        model = quantize_model(copy.deepcopy(base), policy)
        about = {"bits": policy.bits, "method": method, "nmse": _relative_error(model, base)}
        rows.append(_score(model, f"{folder.name} k={policy.bits} {method}", ids, base, about))
    return rows


def _score(model: Any, name: str, ids: torch.Tensor, base: Any, about: dict[str, Any]) -> dict[str, Any]:
    from kbit.bench.quality import compare

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(ids))
        result = compare(model, ids, base, lambda done: progress.update(task, completed=done))
    return {"model": name, **about, **vars(result)}


def _relative_error(model: Any, base: Any) -> float:
    """Squared error of all quantized weights over their squared sum."""
    from kbit.nn.parts import QuantizedModule
    from kbit.ops import dequantize

    error = total = 0.0
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            original = base.get_submodule(name)
            for weight in module.shapes:
                exact = getattr(original, weight).detach().float()
                decoded = dequantize(module.quantized(weight))
                error += float((decoded - exact).square().sum())
                total += float(exact.square().sum())
    return error / total if total else 0.0


def _table(rows: list[dict[str, Any]], window: int) -> Table:
    table = Table(title=f"{rows[0]['tokens']} tokens in windows of {window}")
    for header in ("model", "nmse", "perplexity", "KL divergence"):
        table.add_column(header, justify="left" if header == "model" else "right")
    for row in rows:
        nmse, divergence = row.get("nmse"), row["kl_divergence"]
        table.add_row(
            row["model"],
            "" if nmse is None else f"{nmse:.5f}",
            f"{row['perplexity']:.3f}",
            "" if divergence is None else f"{divergence:.4f}",
        )
    return table
