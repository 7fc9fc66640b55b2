"""`kbit bench decode`: tokens per second of model folders on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console, tracked
from kbit.cli.options import Threads, labels
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

console = Console()


def decode(
    models: Annotated[list[Path], typer.Argument(help="Model folders, quantized or not.")],
    threads: Threads = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt, timed as prefill.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer, timed as decode.")] = 64,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of model folders. One greedy loop; ratios are to the first."""
    import torch

    from kbit.bench import machine
    from kbit.bench.decode import DecodeSpeed, tokens_per_second
    from kbit.cli.model_folder import check_model_folder, load_model
    from kbit.cli.texts import check_positions

    torch.set_num_threads(threads)
    for folder in models:
        check_model_folder(folder)
    about, speeds = machine.describe(), dict[str, DecodeSpeed]()
    for name, folder in tracked(labels(models).items(), "decode"):
        model = load_model(folder)
        asked = f"{folder}: --prompt-tokens {prompt_tokens} with --new-tokens {new_tokens}"
        check_positions(model, prompt_tokens + new_tokens, asked)
        prompt = torch.arange(prompt_tokens)[None] % model.config.get_text_config().vocab_size
        speeds[name] = tokens_per_second(model, prompt, new_tokens)
        del model
        rows = {each: vars(speed) for each, speed in speeds.items()}
        write_json(json_file, {"machine": about, "decode": rows})
    base = next(iter(speeds.values())).decode_tokens_s
    title = f"one stream, {prompt_tokens} prompt and {new_tokens} new tokens, {threads} threads"
    table = text_table(title, ("model", "prefill tok/s", "decode tok/s", "vs first"), left=("model",))
    for name, speed in speeds.items():
        ratio = f"{speed.decode_tokens_s / base:.2f}"
        table.add_row(escape(name), f"{speed.prefill_tokens_s:.0f}", f"{speed.decode_tokens_s:.1f}", ratio)
    show(table)
