"""Checkpoints: what the tensors of a quantized model are called, and checks before anything is loaded.

A checkpoint is a folder with `config.json` and safetensors files. A quantized parameter `name` is stored as
`name_packed` and `name_absmax`, and `name_scale` where the per-matrix factor is not 1. Only headers are read
here, so checking a model of any size takes milliseconds and no memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kbit.format.embeddings import is_embedding, was_embedding
from kbit.format.model_files import CONFIG_NAME, read_config, read_index
from kbit.format.names import ABSMAX, PACKED, SCALE, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.reference import blocks_of
from kbit.format.safetensors_header import TensorInfo
from kbit.format.scales import absmax_format
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import dtype_name, first_of


def parts_to_save(name: str, q: QuantizedTensor) -> dict[str, torch.Tensor]:
    """The tensors that a checkpoint holds for the parameter `name`.

    Args:
        name: the parameter's own name, such as "model.layers.0.mlp.down_proj.weight".
        q: its quantized form.

    Returns:
        {tensor name: tensor}: packed, absmax, and scale if some matrix's factor is not 1.
    """
    parts = {name + PACKED: q.packed, name + ABSMAX: q.absmax}
    if bool((q.scale != 1).any()):
        parts[name + SCALE] = q.scale
    return parts


def read_policy(config: Mapping[str, Any], where: str) -> QuantizationPolicy:
    """The policy in a model's config.

    Args:
        config: content of `config.json`.
        where: its file, for messages.

    Raises:
        ValueError: there is no `quantization_config`, it is not kbit's, or a field of it is out of range.
    """
    section = config.get("quantization_config")
    if section is None:
        raise ValueError(f"{where}: has no quantization_config. Is this an unquantized model?")
    try:
        return QuantizationPolicy.from_dict(section)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from None


def validate_checkpoint(folder: Path) -> QuantizationPolicy:
    """Check a quantized checkpoint before any of its tensors is read.

    Args:
        folder: a model folder.

    Returns:
        The policy in its config; see `policy_in_files`.

    Raises:
        ValueError: the config or a tensor is not what the format says; the message names it.
    """
    folder = Path(folder)
    config = read_config(folder)
    policy = read_policy(config, str(folder / CONFIG_NAME))
    index = read_index(folder)
    policy = policy_in_files(policy, index)
    check_index(index, policy, config)
    return policy


def policy_in_files(policy: QuantizationPolicy, tensors: Mapping[str, TensorInfo]) -> QuantizationPolicy:
    """A checkpoint's policy, with overrides for embeddings and heads that were written as ordinary modules.

    Versions of kbit that knew six names of such gave all others `bits`. Where the shapes say so, and no skip
    or override names the module, an override says it too.

    Args:
        policy: the one in the config.
        tensors: see `read_index`.
    """
    widths = {}
    for name, info in tensors.items():
        module, blocks = module_of(name), tensors.get(original_of(name) + ABSMAX)
        if not name.endswith(PACKED) or not is_embedding(module) or was_embedding(module):
            continue
        plain = blocks is not None and info.shape[-1:] == (policy.bits * sum(blocks.shape[-1:]),)
        if plain and policy.explicit(module) is None:
            widths[module] = policy.bits
    return policy.stating(widths) if widths else policy


def check_index(
    tensors: Mapping[str, TensorInfo], policy: QuantizationPolicy, config: Mapping[str, Any] | None = None
) -> list[str]:
    """Check the quantized tensors of a checkpoint against its policy and the model's config.

    Args:
        tensors: see `read_index`.
        policy: the checkpoint's own.
        config: content of `config.json`; sizes that follow from it are checked too.

    Returns:
        The names of the quantized parameters, without suffix.

    Raises:
        ValueError: a part is missing, or has a dtype or shape other than the policy and config imply.
    """
    originals = ((name, original_of(name)) for name in tensors)
    names = [original for name, original in originals if name == original + PACKED]
    if not names:
        found = first_of(tensors) or "nothing"
        raise ValueError(
            f"the config says kbit, but no tensor is called *{PACKED}: found {found}. "
            f"Were the weights of the unquantized model copied here?"
        )
    _check_partners(tensors)
    for name in names:
        _check_parameter(name, tensors, policy)
        _check_sizes(name, tensors, config or {})
    return names


def _check_partners(tensors: Mapping[str, TensorInfo]) -> None:
    for name, info in tensors.items():
        original = original_of(name)
        if original == name:
            continue
        for part in (PACKED, ABSMAX):
            if original + part not in tensors:
                raise ValueError(
                    f"{info.file}: tensor {name!r} has no {original + part!r} beside it. The checkpoint is "
                    f"incomplete; quantize or fetch it again."
                )
        if original in tensors:
            raise ValueError(
                f"{info.file}: {original!r} is there both quantized and unquantized. Remove one of them."
            )


def _check_parameter(name: str, tensors: Mapping[str, TensorInfo], policy: QuantizationPolicy) -> None:
    packed, absmax = tensors[name + PACKED], tensors[name + ABSMAX]
    where = f"{packed.file}: tensor {name + PACKED!r}"
    bits = policy.bits_for(module_of(name))
    if bits is None:
        raise ValueError(
            f"{where} is quantized, but the config leaves module {module_of(name)!r} unquantized. Config and "
            f"weights are of different models."
        )
    if packed.dtype != torch.int32:
        raise ValueError(f"{where} must be int32, got {dtype_name(packed.dtype)}.")
    expected = absmax_format(policy.absmax_format)
    if absmax.dtype != expected.dtype:
        raise ValueError(
            f"{absmax.file}: tensor {name + ABSMAX!r} must be {dtype_name(expected.dtype)} "
            f"for absmax_format {expected.name!r}, got {dtype_name(absmax.dtype)}."
        )
    if len(packed.shape) not in (2, 3) or 0 in packed.shape:
        raise ValueError(f"{where} must be [N, words] or [E, N, words], none 0, got {packed.shape}.")
    if packed.shape != (*absmax.shape[:-1], absmax.shape[-1] * bits if absmax.shape else 0):
        raise ValueError(
            f"{where} has shape {packed.shape} and its absmax {absmax.shape}; at {bits} bits the last "
            f"dimension must be {bits} times that of absmax and the others equal. The config has other bits "
            f"than the weights, or the file was altered."
        )
    scale = tensors.get(name + SCALE)
    if scale and (scale.dtype != torch.float32 or scale.shape != packed.shape[:-2]):
        raise ValueError(
            f"{scale.file}: tensor {name + SCALE!r} must be float32 of shape {packed.shape[:-2]}, got "
            f"{dtype_name(scale.dtype)} of shape {scale.shape}."
        )


# Projections whose sizes follow from the top level of every config that has the key: pattern, then the keys
# of N and K. What is not listed here is compared with the model itself when it is loaded; so are tables and
# heads, whose rows need not have hidden_size columns nor be of the top level's vocabulary.
_EXPERT = r"^model\.layers\.\d+\.mlp\.experts\.\d+\."
_SIZES: tuple[tuple[str, str | None, str | None], ...] = (
    (r"^model\.layers\.\d+\.self_attn\.[qkv]_proj\.weight$", None, "hidden_size"),
    (r"^model\.layers\.\d+\.self_attn\.o_proj\.weight$", "hidden_size", None),
    (r"^model\.layers\.\d+\.mlp\.(gate|up)_proj\.weight$", None, "hidden_size"),
    (r"^model\.layers\.\d+\.mlp\.down_proj\.weight$", "hidden_size", None),
    (_EXPERT + r"(gate|up)_proj\.weight$", "moe_intermediate_size", "hidden_size"),
    (_EXPERT + r"down_proj\.weight$", "hidden_size", "moe_intermediate_size"),
)


def _check_sizes(name: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    absmax = tensors[name + ABSMAX]
    rows, blocks = absmax.shape[-2:]
    for pattern, out_key, in_key in _SIZES:
        if not re.search(pattern, name):
            continue
        out_features, in_features = config.get(out_key or ""), config.get(in_key or "")
        expected_blocks = blocks_of(in_features) if isinstance(in_features, int) else blocks
        expected_rows = out_features if isinstance(out_features, int) else rows
        if (rows, blocks) != (expected_rows, expected_blocks):
            raise ValueError(
                f"{absmax.file}: tensor {name + ABSMAX!r} has shape {absmax.shape}; the config's sizes give "
                f"{expected_rows} rows of {expected_blocks} blocks. Config and weights are not of one model."
            )
