"""`kbit generate`: continue a prompt, printing tokens as they come."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kbit.cli.options import one_of
from kbit.format.words import counted

console = Console(stderr=True)
# What transformers means by recommending an option that kbit's commands do not have.
_MEANT = {
    "trust_remote_code": "it needs code of its own (auto_map), and kbit runs none. Does a newer transformers "
    "know this architecture?",
    "ignore_mismatched_sizes": "its config.json gives some weights other shapes than they have, see above",
}
LEAST_TEMPERATURE = 1e-3
DTYPES = ("auto", "float32", "float16", "bfloat16")
_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken.json")


def load_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """Load a causal language model, quantized by kbit or not, in evaluation mode.

    Args:
        folder: a local model folder.
        dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16".
        device: where to put it.

    Raises:
        ValueError, OSError: not a model folder, or a damaged one; no such dtype or device.
    """
    from transformers import AutoModelForCausalLM

    one_of("--dtype", dtype, DTYPES)
    check_device(device)
    config = check_model_folder(folder)
    with _explained(
        folder, "model", "Is config.json that of this model? Else fetch the folder again.", config
    ):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(
            f"{folder} has no weights for {counted(len(missing), 'parameter')} of the model, such as "
            f"{missing[0]}. Is config.json that of this model, and its quantization_config known? Else fetch "
            f"the folder again."
        )
    return model.to(device).eval()


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Say what is wrong with a folder before transformers takes it for a name on a hub.

    Returns:
        The content of its config.json.

    Raises:
        FileNotFoundError: no folder, or no config.json in it.
        ValueError: the config is no JSON object, or there are no safetensors files.
    """
    from kbit.format.checkpoint import checkpoint_files, read_config, read_policy
    from kbit.format.policy import QUANT_METHOD

    if not (folder / "config.json").is_file():
        what = "has no config.json" if folder.is_dir() else "is not a folder"
        raise FileNotFoundError(f"{folder} {what}. Give the local folder of a transformers model.")
    config = read_config(folder)
    section = config.get("quantization_config") or {}
    if not isinstance(section, Mapping) or section.get("quant_method") == QUANT_METHOD:
        read_policy(config, str(folder / "config.json"))
    checkpoint_files(folder)
    return config


def check_device(name: str) -> None:
    """Say that there is no such device before a model is loaded for it; raises ValueError."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which nothing runs on
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no device {name!r}. Use cpu, cuda or cuda:1.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"no device {name!r}: torch sees {torch.cuda.device_count()} GPUs. Use another, or cpu."
        )


@contextmanager
def _explained(folder: Path, what: str, remedy: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Turn what transformers raises for a folder it cannot read into one line: ValueError."""
    try:
        yield
    except Exception as error:
        message, more, _ = str(error).partition("\n")
        clear = isinstance(error, ValueError | OSError | ImportError | RuntimeError)
        meant = next((text for option, text in _MEANT.items() if option in str(error)), None)
        if clear and not (more or meant or isinstance(error, json.JSONDecodeError)):
            raise
        keys = [key for key, value in config.items() if error.args and value == error.args[0]]
        if keys and isinstance(error, KeyError):
            message = f"transformers does not know the {keys[0]} {message} of its config.json"
        elif not clear:
            message = f"{type(error).__name__}: {message}"
        raise ValueError(
            f"{folder}: its {what} cannot be loaded: {(meant or message).rstrip('.')}. {remedy}"
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        FileNotFoundError: it is no model folder, or has no tokenizer.
        ValueError: the tokenizer is damaged.
    """
    from transformers import AutoTokenizer

    config = check_model_folder(folder)
    # Without any, transformers makes some classes of tokenizers with an empty vocabulary.
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"{folder} has no tokenizer. Copy the model's tokenizer.json and tokenizer_config.json into it."
        )
    remedy = "Fetch tokenizer.json and tokenizer_config.json again."
    with _explained(folder, "tokenizer", remedy, config):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def encode_prompt(tokenizer: Any, prompt: str, system: str | None = None, chat: bool = True) -> Any:
    """Token ids [1, T] of a prompt, through the model's chat template where it has one.

    Raises:
        ValueError: the template is damaged, or has no system message, say.
    """
    if not (chat and tokenizer.chat_template):
        return tokenizer(prompt, return_tensors="pt").input_ids
    from jinja2 import TemplateError

    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        raise ValueError(
            f"the chat template cannot be used: {error}. Repair chat_template.jinja, or use --no-chat."
        ) from None
    return encoded["input_ids"]


def generate(
    folder: Annotated[Path, typer.Argument(help="Model folder, quantized or not.")],
    prompt: Annotated[str, typer.Argument(help="What to say to it.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    system: Annotated[str | None, typer.Option(help="System message, for chat models.")] = None,
    chat: Annotated[bool, typer.Option(help="Use the chat template if there is one.")] = True,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="For a temperature above 0.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, float32, float16 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
) -> None:
    """Stream an answer to a prompt and say how fast it came."""
    import torch
    from transformers import TextStreamer

    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"--temperature {temperature:g} leaves nothing to sample. Use 0, which decodes greedily, or at "
            f"least {LEAST_TEMPERATURE:g}."
        )
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
