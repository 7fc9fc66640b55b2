"""Loading without data: what transformers would miss in a checkpoint, known from its headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from kbit.format.safetensors_header import TensorInfo
from kbit.format.words import first_of


def check_complete(model: Any, index: Mapping[str, TensorInfo], where: str) -> str | None:
    """Load a checkpoint into a model on the meta device, and compare the two.

    transformers' own loader does it, so renamed, fused and tied weights count as it counts them, and so do
    the tensors that a class of models lists as dispensable.

    Args:
        model: a PreTrainedModel on the meta device; its parameters are replaced.
        index: the checkpoint's tensors.
        where: its folder, for messages.

    Returns:
        A warning that names tensors which the model does not use, or None.

    Raises:
        ValueError: a parameter of the model is missing, or has another shape.
    """
    found = _load(model, index)
    unused = f"tensors that {type(model).__name__} does not use: {first_of(found.unexpected_keys)}"
    wrong = [
        f"{name} is {list(stored)} and not {list(expected)}"
        for name, stored, expected in sorted(found.mismatched_keys)
    ]
    unfit = set(found.conversion_errors)
    problems = [f"missing: {first_of(found.missing_keys - unfit)}"] if found.missing_keys - unfit else []
    problems += [f"of another shape: {first_of(wrong)}"] if wrong else []
    problems += [f"made of tensors that do not fit together: {first_of(unfit)}"] if unfit else []
    if problems:
        problems += [unused] if found.unexpected_keys else []
        raise ValueError(
            f"{where}: its tensors are not those of the {type(model).__name__} in config.json; "
            f"{'; '.join(problems)}. Fetch the folder again, or correct config.json."
        )
    return f"{where} has {unused}. They are copied as they are." if found.unexpected_keys else None


def _load(model: Any, index: Mapping[str, TensorInfo]) -> Any:
    """What transformers' loader reports: its LoadStateDictInfo."""
    tensors = {name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in index.items()}
    settings = LoadStateDictConfig(
        device_map={"": "meta"}, weight_mapping=get_model_conversion_mapping(model)
    )
    with _quiet():
        found, _ = convert_and_load_state_dict_in_model(model, tensors, settings)
        model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(found)
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bar and its warnings, of which ours are the shorter."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
