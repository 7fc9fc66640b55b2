"""Model folders that commands are given: checked, and loaded, with one line about what is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from kbit.cli.consoles import warn
from kbit.cli.options import SHORT_DTYPES, long_dtype, one_of
from kbit.format.model_files import OWN_CODE
from kbit.format.words import counted
from kbit.integrations.devices import find_device

# What transformers means by recommending an option that kbit's commands do not have.
_MEANT = {
    "trust_remote_code": OWN_CODE,
    "issues during automatic conversion": "its weights do not fit together, see above",
    "ignore_mismatched_sizes": "its config.json gives some weights other shapes than they have, see above",
}
DTYPES = ("auto", "float32", "float16", "bfloat16")
DTYPE_HELP = "auto (the model's own), float32, float16 (or fp16) or bfloat16 (or bf16)"
TOKENIZER_REMEDY = "Copy the model's tokenizer.json and tokenizer_config.json into it."
_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "tekken.json")


def bars_on_terminals_only() -> None:
    """Keep transformers' progress bars out of logs and pipes, where each of their steps is more text."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def known_dtype(dtype: str) -> str:
    """torch's name of an option --dtype, or "auto".

    Raises:
        ValueError: there is no such dtype.
    """
    one_of("--dtype", dtype, (*DTYPES, *SHORT_DTYPES))
    return long_dtype(dtype)


def load_model(folder: Path, dtype: str = "auto", device: str = "cpu") -> Any:
    """Load a causal language model, quantized by kbit or not, in evaluation mode.

    Args:
        folder: a local model folder.
        dtype: "auto" (the checkpoint's), "float32", "float16" or "bfloat16", or short "fp32", "fp16", "bf16".
        device: where to put it.

    Raises:
        ValueError, OSError: not a model folder, or a damaged one; no such dtype or device.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kbit.dispatch.backends import backend_for

    dtype = known_dtype(dtype)
    place = find_device(device)
    config = check_loadable(folder)
    if "quantization_config" in config:
        backend_for("linear", place, torch.uint8)  # a wrong KBIT_BACKEND is found before the model is loaded
    bars_on_terminals_only()
    with explained_loading(folder, config):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    refuse_missing(folder, found["missing_keys"])
    if place.type == "cpu" and "nvfp4" in str((config.get("quantization_config") or {}).get("quant_method")):
        warn("on a CPU NVFP4 runs by its reference, for checking, and slowly.")
    return model.to(place).eval()


def check_loadable(folder: Path) -> dict[str, Any]:
    """Say what is wrong with the folder of a model that is to answer, as far as it shows before loading.

    Returns:
        The content of its config.json.

    Raises:
        OSError, ValueError: no model folder, or one that transformers cannot load.
    """
    config = check_model_folder(folder)
    _check_method(folder, config)
    _check_generation_config(folder)
    return config


def explained_loading(folder: Path, config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """A context that turns what transformers raises for a model it cannot load into one line: ValueError."""
    return _explained(
        folder, "model", "Is config.json that of this model? Else fetch the folder again.", config
    )


def refuse_missing(folder: Path | str, missing: Iterable[str]) -> None:
    """Refuse a model that transformers would fill up with random numbers.

    Args:
        folder: what it was loaded from.
        missing: parameters for which there were no weights.

    Raises:
        ValueError: there are any.
    """
    if names := sorted(missing):
        raise ValueError(
            f"{folder} has no weights for {counted(len(names), 'parameter')} of the model, such as "
            f"{names[0]}. Is config.json that of this model, and its quantization_config known? Else fetch "
            f"the folder again."
        )


def _check_generation_config(folder: Path) -> None:
    """Say that a folder's settings for answers are none before loading its model fails by them.

    Raises:
        ValueError: transformers reads generation_config.json, and cannot use it.
    """
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder)
    except OSError:  # there is none, or no JSON in it: transformers does without
        return
    except Exception as error:
        raise ValueError(
            f"{folder / 'generation_config.json'} cannot be used: {type(error).__name__}: {error}. Fetch it "
            f"again, or remove it: answers then have the defaults of transformers."
        ) from None


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Say what is wrong with a folder before transformers takes it for a name on a hub.

    Returns:
        The content of its config.json.

    Raises:
        FileNotFoundError: no folder, or no config.json in it.
        ValueError: the config is no JSON object, or promises more layers than there can be, or there are no
            safetensors files.
    """
    from kbit.format.checkpoint import read_policy
    from kbit.format.counts import refuse_more_than_tensors
    from kbit.format.model_files import checkpoint_files, no_model, read_config
    from kbit.format.policy import QUANT_METHOD

    if not (folder / "config.json").is_file():
        raise FileNotFoundError(no_model(folder))
    config = read_config(folder)
    section = config.get("quantization_config", {})
    if not isinstance(section, Mapping | None) or (section or {}).get("quant_method") == QUANT_METHOD:
        read_policy(config, str(folder / "config.json"))
    checkpoint_files(folder)
    refuse_more_than_tensors(folder, config)
    return config


def _check_method(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse codes of a method that transformers does not know: it would take them for weights."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    from kbit.format.model_files import read_index

    method = (config.get("quantization_config") or {}).get("quant_method")
    if not isinstance(method, str) or method in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    dtypes = {info.dtype for name, info in read_index(folder).items() if ".weight" in name}
    if any(dtype.itemsize == 1 or not dtype.is_floating_point for dtype in dtypes):
        raise ValueError(
            f"{folder} is quantized by {method!r}, which transformers cannot load. Start from the "
            f"unquantized model; kbit inspect describes the folder if its weights are in NVFP4."
        )


@contextmanager
def _explained(folder: Path, what: str, remedy: str, config: Mapping[str, Any]) -> Iterator[None]:
    """Turn what transformers raises for a folder it cannot read into one line: ValueError."""
    try:
        yield
    except Exception as error:
        message, more, _ = str(error).partition("\n")
        if what == "model" and "Unrecognized configuration class" in message:
            raise ValueError(
                f"{folder} has a model of type {config['model_type']!r}, and this takes causal language "
                f"models (AutoModelForCausalLM). In Python its own class loads it, quantized or not."
            ) from error
        if type(error).__name__.startswith("StrictDataclass"):  # a field of a config; the cause is on line 2
            what, remedy, message = "config.json", "Fetch it again.", " ".join(str(error).split())
        clear = isinstance(error, ValueError | OSError | ImportError | RuntimeError)
        meant = next((text for option, text in _MEANT.items() if option in str(error)), None)
        if clear and not (more or meant or isinstance(error, json.JSONDecodeError)):
            raise
        keys = [key for key, value in config.items() if error.args and value == error.args[0]]
        if keys and isinstance(error, KeyError):
            message = f"transformers does not know the {keys[0]} {message} of its config.json"
        elif not clear:
            message = f"{type(error).__name__}: {message}"
        message = (meant or message).rstrip(".")
        end = "" if message.endswith(("?", "!")) else "."
        raise ValueError(f"{folder}: its {what} cannot be loaded: {message}{end} {remedy}") from error


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has files that a tokenizer may be in."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        FileNotFoundError: it is no model folder, or has no tokenizer.
        ValueError: the tokenizer is damaged.
    """
    from transformers import AutoTokenizer

    config = check_model_folder(folder)
    # Without any, transformers makes some classes of tokenizers with an empty vocabulary.
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{folder} has no tokenizer. {TOKENIZER_REMEDY}")
    remedy = "Fetch tokenizer.json and tokenizer_config.json again."
    with _explained(folder, "tokenizer", remedy, config):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
