"""Which modules of a checkpoint are quantized, and how wide: read from headers, whatever a policy says.

vLLM calls modules otherwise than transformers, merges some, and has layers where transformers has bare
parameters. So a layer asks here what the checkpoint holds under the names that it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kbit.format.checkpoint import check_index, policy_in_files
from kbit.format.model_files import CONFIG_NAME, read_config, read_index
from kbit.format.names import ABSMAX, PACKED, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import DTYPES, TensorInfo


def index_of(model: str, revision: str | None, policy: QuantizationPolicy) -> dict[str, TensorInfo]:
    """The headers of a checkpoint, checked.

    Args:
        model: a folder, or a name on the hub.
        revision: of the latter.
        policy: the checkpoint's own.

    Raises:
        ValueError: the checkpoint is not what the format says, or its headers cannot be read.
    """
    folder = Path(model)
    if folder.is_dir():
        index = read_index(folder)
        config = read_config(folder) if (folder / CONFIG_NAME).is_file() else None
        check_index(index, policy_in_files(policy, index), config)
        return index
    from vllm.transformers_utils.config import get_safetensors_params_metadata

    index = _from_metadata(get_safetensors_params_metadata(model, revision=revision), Path(model))
    if not index:
        raise ValueError(
            f"{model}: the headers of its safetensors files cannot be read, which say what is quantized. "
            f"Fetch the checkpoint (hf download {model}) and try again."
        )
    check_index(index, policy_in_files(policy, index))
    return index


def _from_metadata(metadata: Mapping[str, Mapping[str, Any]], file: Path) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), 0)
        for name, entry in metadata.items()
        if entry.get("dtype") in DTYPES  # others are no parts of a quantized weight, or no tensors
    }


def widths(index: Mapping[str, TensorInfo]) -> dict[str, int]:
    """{module: bits} of the quantized modules in checked headers; all experts of a layer are one.

    >>> from kbit.format.model_files import read_index
    >>> widths(read_index(folder))["model.layers.0.mlp.down_proj"]
    4
    """
    found: dict[str, int] = {}
    for name, info in index.items():
        original = original_of(name)
        if name == original + PACKED:
            found[module_of(name)] = info.shape[-1] // index[original + ABSMAX].shape[-1]
    return found
