"""`kbit generate`: continue a prompt, printing tokens as they come."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kbit.cli.consoles import Console
from kbit.cli.hub import folder_of
from kbit.cli.model_folder import DTYPE_HELP, known_dtype, load_model, load_tokenizer
from kbit.cli.texts import check_ids, known_positions, too_long
from kbit.format.words import counted
from kbit.integrations.devices import find_device
from kbit.integrations.transformers.token_times import TokenTimes

console = Console(stderr=True)
LEAST_TEMPERATURE = 1e-3
HALF_A_PAIR = re.compile("[\ud800-\udfff]")  # a surrogate alone, which is no character


def encode_prompt(tokenizer: Any, prompt: str, system: str | None = None, chat: bool = True) -> Any:
    """Token ids [1, T] of a prompt, through the model's chat template where it has one.

    Raises:
        ValueError: a text is not UTF-8; the template is damaged, or has no system message, say; or there is a
            system message and no template to put it into.
    """
    for name, text in (("prompt", prompt), ("--system", system or "")):
        if HALF_A_PAIR.search(text):  # what Python makes of a terminal's bytes that are no UTF-8
            raise ValueError(
                f"{name} {text[:80]!a} is not UTF-8 text. Convert it, or set the terminal to UTF-8."
            )
    if not (chat and tokenizer.chat_template):
        if system is not None:
            why = "the tokenizer has none" if chat else "--no-chat leaves it out"
            raise ValueError(f"--system needs a chat template, and {why}. Put that text into the prompt.")
        return tokenizer(prompt, return_tensors="pt").input_ids
    from jinja2 import TemplateError

    texts = [("system", system)] * bool(system) + [("user", prompt)]
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in texts]
    in_parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
    more: dict[str, Any] = {"add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **more)
        if prompt.strip() not in text and prompt.strip() in _rendered(tokenizer, in_parts, more):
            messages = in_parts  # as templates of models that see may want it
        encoded = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True, **more)
    except Exception as error:  # of whatever a template computes
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the chat template cannot be used: {said}. Repair chat_template.jinja, or use --no-chat."
        ) from None
    return encoded["input_ids"]


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], more: dict[str, Any]) -> str:
    """Messages as a template has them; nothing where it cannot take them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **more))
    except Exception:  # of whatever a template computes
        return ""


def _from_stdin() -> str:
    if sys.stdin is None:
        raise ValueError("the prompt - is standard input, which is closed. Pipe a text into the command.")
    return sys.stdin.read().removesuffix("\n")


def _summary(times: TokenTimes) -> str:
    """How many tokens came, and how fast."""
    line = f"{counted(len(times.tokens), 'token')} in {times.tokens[-1]:.1f} s"
    if times.tokens_s is None:
        return line
    return f"{line}; the first after {times.tokens[0]:.2f} s, then {times.tokens_s:.1f} tokens/s (median)"


def _decode_fast(model: Any, compiled: bool) -> dict[str, Any]:
    """Have a model on a GPU decode from CUDA graphs where it can; arguments of its `generate` for that."""
    from transformers import StaticCache

    from kbit.integrations.transformers.cuda_graphs import enable_cuda_graphs, why_not_recorded

    if model.device.type != "cuda":
        return {}
    try:
        config = model.config.get_text_config(decoder=True)
        reason = why_not_recorded(StaticCache(config=config, max_cache_len=1))
    except (LookupError, AttributeError, NotImplementedError, TypeError, ValueError):
        reason = "it has no cache of a fixed size"
    if reason is not None:
        console.print(f"[dim]without CUDA graphs: {reason}[/dim]")
        return {}
    enable_cuda_graphs(model, compile_layers=compiled)
    return {"cache_implementation": "static"}


def _sampling(temperature: float, top_p: float, top_k: int | None) -> dict[str, Any]:
    """How `generate` of a model chooses tokens; raises ValueError for options that contradict each other."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"--temperature {temperature:g} leaves nothing to sample. Use 0, which decodes greedily, or at "
            f"least {LEAST_TEMPERATURE:g}."
        )
    for name, given in (("--top-p", top_p < 1), ("--top-k", top_k is not None)):
        if given and not temperature:
            raise ValueError(f"{name} is for sampling. Add --temperature, such as 0.8, or leave it out.")
    if not temperature:
        return {"do_sample": False}
    own = {} if top_k is None else {"top_k": top_k}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, **own}


def _overlap(device: str) -> None:
    """Have kernels of torch.compile start early; raises ValueError for a device that is no GPU."""
    from kbit.integrations.transformers.compiled_layers import overlap_kernels

    if not device.startswith("cuda"):
        raise ValueError(f"--compile is for GPUs, and the device is {device}. Add --device cuda.")
    overlap_kernels()


def _most_tokens(model: Any, tokens: int, wanted: int) -> int:
    """How long the answer may get, which ends with the positions that a model knows.

    Raises:
        ValueError: they end with the prompt, or before.
    """
    positions = known_positions(model)
    if positions is None:
        return wanted
    if tokens >= positions:
        raise ValueError(too_long(tokens, positions))
    return min(wanted, positions - tokens)


def generate(
    folder: Annotated[
        Path, typer.Argument(help="Model, quantized or not: a folder, or ORG/MODEL on the hub.")
    ],
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the answer at most.")] = 128,
    system: Annotated[str | None, typer.Option(help="System message, for chat models.")] = None,
    chat: Annotated[bool, typer.Option(help="Use the chat template if there is one.")] = True,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; above, tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Draw from the likeliest tokens of this total probability."),
    ] = 1.0,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0, help="Draw from so many likeliest tokens: the model's own choice, or 50; 0: all."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed.")] = 0,
    dtype: Annotated[str, typer.Option(help=f"What layers compute in: {DTYPE_HELP}.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="On a GPU, torch.compile the layers: a minute, then faster.")
    ] = False,
) -> None:
    """Stream an answer to a prompt and say how fast it came."""
    import torch
    from transformers import TextStreamer

    from kbit.cli.compile_ahead import compile_ahead
    from kbit.integrations.transformers.static_caches import recorded_length

    sampling = _sampling(temperature, top_p, top_k)
    known_dtype(dtype)  # before anything is fetched
    find_device(device)
    if compiled:
        _overlap(device)
    prompt = _from_stdin() if prompt == "-" else prompt
    folder = folder_of(folder)
    tokenizer = load_tokenizer(folder)
    input_ids = encode_prompt(tokenizer, prompt, system, chat)
    if not (tokens := input_ids.shape[1]):
        raise ValueError(f"the prompt {prompt!r} has no tokens. Give it some words.")
    model = load_model(folder, dtype, device)  # with transformers' bar, which a spinner would tear apart
    check_ids(folder, input_ids, model)
    most = _most_tokens(model, tokens, max_new_tokens)
    padded = recorded_length(1, tokens) if model.device.type == "cuda" else None
    compile_ahead(model, (1, padded or tokens))
    input_ids = input_ids.to(model.device)
    torch.manual_seed(seed)
    times = TokenTimes(TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=most,
        num_beams=1,  # a streamer takes no more, whatever the model's own settings say
        num_return_sequences=1,
        tokenizer=tokenizer,  # for strings that end an answer, by those settings
        streamer=times,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        **sampling,
        **_decode_fast(model, compiled),
    )
    console.print(f"[dim]{_summary(times)}[/dim]")
