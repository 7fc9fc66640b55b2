"""`kbit generate`: continue a prompt, printing tokens as they come."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

console = Console(stderr=True)
_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken.json")


def load_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """Load a causal language model, quantized by kbit or not, in evaluation mode.

    Args:
        folder: a local model folder.
        dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16".
        device: where to put it.

    Raises:
        ValueError, OSError: not a model folder, or a damaged one; no such device.
    """
    from transformers import AutoModelForCausalLM

    check_model_folder(folder)
    check_device(device)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def check_model_folder(folder: Path) -> None:
    """Say what is wrong with a folder before transformers takes it for a name on a hub.

    Raises:
        FileNotFoundError: no folder, or no config.json in it.
    """
    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(f"{folder} {what}. Give the local folder of a transformers model.")


def check_device(name: str) -> None:
    """Say that there is no such GPU before a model is loaded for it; raises ValueError."""
    import torch

    index = torch.device(name).index or 0
    if name.startswith("cuda") and index >= torch.cuda.device_count():
        raise ValueError(
            f"no device {name!r}: torch sees {torch.cuda.device_count()} GPUs. Use another, or cpu."
        )


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        FileNotFoundError: it is no model folder, or has no tokenizer.
    """
    from transformers import AutoTokenizer

    check_model_folder(folder)
    # Without any, transformers makes some classes of tokenizers with an empty vocabulary.
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{folder} has no tokenizer. Copy the model's tokenizer.json and tokenizer_config.json into it."
        )
    return AutoTokenizer.from_pretrained(folder)


def encode_prompt(tokenizer: Any, prompt: str, system: str | None = None, chat: bool = True) -> Any:
    """Token ids [1, T] of a prompt, through the model's chat template where it has one."""
    if not (chat and tokenizer.chat_template):
        return tokenizer(prompt, return_tensors="pt").input_ids
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def generate(
    folder: Annotated[Path, typer.Argument(help="Model folder, quantized or not.")],
    prompt: Annotated[str, typer.Argument(help="What to say to it.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    system: Annotated[str | None, typer.Option(help="System message, for chat models.")] = None,
    chat: Annotated[bool, typer.Option(help="Use the chat template if there is one.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(help="For a temperature above 0.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Stream an answer to a prompt and say how fast it came."""
    import torch
    from transformers import TextStreamer

    tokenizer = load_tokenizer(folder)
    with console.status("loading"):
        model = load_model(folder, dtype, device)
    torch.manual_seed(seed)
    input_ids = encode_prompt(tokenizer, prompt, system, chat).to(model.device)
    if not input_ids.numel():
        raise ValueError(f"the prompt {prompt!r} has no tokens. Give it some words.")
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p} if temperature else {}
    start = time.perf_counter()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **(sampling or {"do_sample": False}),
    )
    seconds = time.perf_counter() - start
    new = output.shape[1] - input_ids.shape[1]
    console.print(f"[dim]{new} tokens in {seconds:.1f} s, {new / seconds:.1f} tokens/s[/dim]")
