"""Models of published sizes with random weights, built by blocks: they never exist whole in 16 bits."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kbit.bench import machine
from kbit.bench.result_files import read_text
from kbit.format.policy import QuantizationPolicy
from kbit.format.strict_json import parse_json
from kbit.nn import quantize_model
from kbit.nn.replace import Progress
from kbit.nn.residuals import fuse_residuals


def config_names() -> list[str]:
    """The models whose sizes are shipped."""
    return sorted(
        entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith("json")
    )


def load_config(name: str, layers: int | None = None) -> Any:
    """A transformers config.

    Args:
        name: of a shipped one (`config_names`), or a JSON file like theirs, such as a model's config.json.
        layers: keep only so many; None keeps all.

    Raises:
        ValueError: the name is unknown, the file names no model type that transformers has, or the model has
            fewer layers.

    A head that shares the embeddings' weight gets one of its own: it takes the same time, and a table more
    memory.
    """
    from transformers import AutoConfig

    values = _read(name)
    model_type = values.pop("model_type", None)
    if layers is not None:
        _cut(values, layers, name)
    for key in ("quantization_config", "transformers_version", "torch_dtype", "dtype", "architectures"):
        values.pop(key, None)
    values["tie_word_embeddings"] = False
    if not isinstance(model_type, str):
        raise ValueError(f"{name}: model_type must name a class of transformers, got {model_type!r}.")
    return AutoConfig.for_model(model_type, **values)


def _folder() -> Any:
    return resources.files("kbit").joinpath("data").joinpath("configs")


def _read(name: str) -> dict[str, Any]:
    if name.endswith(".json"):
        text = read_text(Path(name), name, "Name a model's config.json.")
    elif name in config_names():
        text = _folder().joinpath(f"{name}.json").read_text()
    else:
        raise ValueError(f"no model {name!r}; known: {', '.join(config_names())}, or a path to a .json.")
    try:
        values = parse_json(text.encode(), not_finite=True)
    except ValueError as error:
        raise ValueError(f"{name} is no JSON ({error}).") from None
    if not isinstance(values, dict):
        raise ValueError(f"{name}: a config is a JSON object, got {type(values).__name__}.")
    return values


def _cut(values: dict[str, Any], layers: int, name: str) -> None:
    """Keep the first layers, in lists with an entry for each too."""
    total = values.get("num_hidden_layers")
    if not isinstance(total, int):
        raise ValueError(f"{name} states no num_hidden_layers, so its first {layers} cannot be kept.")
    if not 1 <= layers <= total:
        raise ValueError(f"{name} has {total} layers, of which 1 to {total} can be kept; got {layers}.")
    for key, value in values.items():
        if isinstance(value, list) and len(value) == total:
            values[key] = value[:layers]
    values["num_hidden_layers"] = layers


@dataclass(frozen=True)
class Built:
    """A model and what it took to build it: bytes of its parameters, and the most memory meanwhile."""

    model: Any
    weight_bytes: int
    peak_bytes: int | None


@contextlib.contextmanager
def freeing(device: torch.device) -> Iterator[None]:
    """At the end, free the memory of models that nobody holds any more: the next one may need all of it."""
    try:
        yield
    finally:
        gc.collect()  # models hold themselves in cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()


def sixteen_bit_bytes(config: Any) -> int:
    """Bytes of a model's parameters in 16 bits; nothing is allocated."""
    return 2 * sum(parameter.numel() for parameter in on_meta(config, torch.bfloat16).parameters())


def on_meta(config: Any, dtype: torch.dtype) -> Any:
    """A causal language model without data."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def build(
    config: Any,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    policy: QuantizationPolicy | None = None,
    progress: Progress | None = None,
) -> Built:
    """Build a model of random weights on a device.

    Blocks are taken one after the other: allocated in 16 bits, initialized as transformers initializes a new
    model (normal, 0.02 unless the config says otherwise), and quantized at once. So the peak is the model as
    it ends up, plus one block.

    Args:
        config: a transformers config of a causal language model.
        device: where.
        dtype: of what is not quantized.
        policy: what is quantized; None leaves all in `dtype`.
        progress: called as progress(done, total, name) after each block.
    """
    start(device)
    model = on_meta(config, dtype)
    for name, block in blocks(model, device, policy, progress):
        model.set_submodule(name, block)
        del block
    model.requires_grad_(False)
    return finished(model, device)


def start(device: torch.device) -> None:
    """Begin a model: the same random numbers each time, and the peak of memory counted from here."""
    machine.reset_gpu_peak(device)
    torch.manual_seed(0)


def finished(model: Any, device: torch.device) -> Built:
    """A model that is complete, or this rank's part of one, with its sizes."""
    fuse_residuals(model)  # which blocks, quantized one by one, could not have
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    sizes = [getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors.values()]  # of DTensors
    return Built(model, sum(sizes), machine.gpu_peak_bytes(device))


def blocks(
    model: Any, device: torch.device, policy: QuantizationPolicy | None, progress: Progress | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a model on the meta device, one after the other, random and quantized.

    Args:
        model: whose submodules they are; each is allocated in place.
        device: where.
        policy: what is quantized.
        progress: called as progress(done, total, name) after each block.

    Yields:
        (name, block). Drop it before asking for the next.
    """
    names = list(_blocks(model))
    for done, name in enumerate(names, start=1):
        block = model.get_submodule(name)
        block.to_empty(device=device)
        with torch.no_grad():
            block.apply(model._init_weights)
        yield name, block if policy is None else quantize_block(block, name, policy)
        del block
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if progress is not None:
            progress(done, len(names), name)


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the entries of a model's lists of layers, and of the modules with tensors outside of them."""
    for name, child in module.named_children():
        full = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield from (f"{full}.{index}" for index in range(len(child)))
        elif child._parameters or child._buffers:
            yield full
        else:
            yield from _blocks(child, f"{full}.")


def quantize_block(block: nn.Module, name: str, policy: QuantizationPolicy) -> nn.Module:
    """Quantize a part of a model, which a policy sees under its full name; what takes its place."""
    root = owner = nn.Module()
    *path, last = name.split(".")
    for part in path:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.add_module(last, block)
    with warnings.catch_warnings():  # about what a part alone lacks
        warnings.filterwarnings("ignore", "kbit (quantized no layer|found no module)", UserWarning)
        quantize_model(root, policy)
    return owner.get_submodule(last)
