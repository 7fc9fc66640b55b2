"""What `kbit inspect` says of folders with NVFP4 weights, whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbit.cli.inspected import Folder, Module, count_unquantized, missing, read

if TYPE_CHECKING:
    import torch

    from kbit.format.safetensors_header import TensorInfo
    from kbit.nvfp4 import NVFP4Tensor
    from kbit.nvfp4.readers.stored import StoredWeight

# What an expert's projections are called where experts are stored one by one: of kbit's fused weight, and in
# Mixtral's files and those like them.
_ONE_BY_ONE = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def read_nvfp4(folder: Path, config: Mapping[str, Any]) -> Folder | None:
    """A folder of NVFP4 weights; None if it has none and does not say so.

    Args:
        folder: a model folder.
        config: content of its config.json.

    Raises:
        ValueError: its tensors are not what its config says, or do not fit together.
    """
    section = config.get("quantization_config")
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    from kbit.format.model_files import read_index
    from kbit.format.policy import QUANT_METHOD
    from kbit.nvfp4.readers.stored import KBIT, stored_weights

    if method == QUANT_METHOD:
        return None
    index = read_index(folder)
    weights = stored_weights(index)
    if not weights:
        if method != KBIT:
            return None
        raise ValueError(
            f"{folder}: the config says {KBIT}, but no tensor is called *_codes. Were the weights of the "
            f"unquantized model copied here?"
        )
    modules = _modules(index, weights)
    how, why_not = _described(weights, section if method == KBIT else None)
    return Folder(
        modules, how, len(weights), why_not, lambda source: _add_errors(modules, index, source, weights)
    )


def _modules(index: Mapping[str, TensorInfo], weights: list[StoredWeight]) -> dict[str, Module]:
    from kbit.format.names import module_of

    owners = {name: weight for weight in weights for name in weight.tensors}
    modules: dict[str, Module] = {}
    for name, info in index.items():
        weight = owners.get(name)
        if weight is None:
            count_unquantized(modules, name, info)
            continue
        owner = module_of(weight.weight)
        module = modules.setdefault(owner, Module(owner, 4, "nvfp4"))
        module.bytes += info.nbytes
        if name == weight.codes:
            module.tensors += 1
            module.weights += math.prod(weight.shape)
    return modules


def _described(
    weights: list[StoredWeight], section: Mapping[str, Any] | None
) -> tuple[str, Callable[[str], str | None]]:
    """For the title, and why a module is not quantized: only kbit's own config says more than its writer."""
    from kbit.format.names import module_of

    if section is None:
        return f"NVFP4 of {weights[0].spelling}", lambda name: None
    from kbit.integrations.nvfp4.config import NVFP4Config

    config = NVFP4Config.from_dict(section)
    how = f"W4A4, accum {config.accum}" if config.activations == "nvfp4" else "W4A16"

    def why_not(name: str) -> str:
        return config.why_not(module_of(name)) or "it is no linear layer, nor experts that NVFP4Config takes"

    return f"NVFP4, {how}", why_not


def _add_errors(
    modules: dict[str, Module],
    index: Mapping[str, TensorInfo],
    source: Mapping[str, TensorInfo],
    weights: list[StoredWeight],
) -> Iterator[str]:
    """Decode every weight, expert by expert, and add its squared error against the original; yields names."""
    from kbit.format.names import module_of
    from kbit.nvfp4 import dequantize_nvfp4

    for weight in weights:
        module = modules[module_of(weight.weight)]
        for expert in range(weight.shape[0]) if len(weight.shape) == 3 else (None,):
            original = _original(source, weight, expert)
            decoded = dequantize_nvfp4(_tensor(index, weight, expert))[:, : original.shape[-1]]
            if decoded.shape != original.shape:
                raise ValueError(
                    f"{weight.weight} has shape {tuple(decoded.shape)}, in the source "
                    f"{tuple(original.shape)}. Is it the model this was made from?"
                )
            module.add_error(decoded, original)
        yield weight.weight


def _tensor(index: Mapping[str, TensorInfo], weight: StoredWeight, expert: int | None) -> NVFP4Tensor:
    """A matrix, its elements beyond K included."""
    import torch

    from kbit.nvfp4 import NVFP4Tensor
    from kbit.nvfp4.readers.checks import check_global_scale, check_scale_bytes

    shared = index[weight.factor].numel == 1
    codes, scales = (read(index, name, expert) for name in (weight.codes, weight.scales))
    factor = read(index, weight.factor, None if shared else expert)
    scales, factor = scales.view(torch.uint8), factor.float().reshape(())
    check_scale_bytes(scales, weight.scales)
    check_global_scale(float(factor), weight.factor)
    if weight.spelling == "compressed-tensors":
        factor = torch.ones_like(factor) / factor
    return NVFP4Tensor(codes, scales, factor, weight.shape[-2:])


def _original(source: Mapping[str, TensorInfo], weight: StoredWeight, expert: int | None) -> torch.Tensor:
    """What a matrix was before; of fused experts that the source holds one by one, gate above up."""
    if weight.weight in source:
        return read(source, weight.weight, expert)
    experts, _, projection = weight.weight.rpartition(".")
    for names in _ONE_BY_ONE.get(projection, ()):
        parts = [f"{experts}.{expert}.{name}.weight" for name in names]
        if all(part in source for part in parts):
            import torch

            return torch.cat([read(source, part) for part in parts])
    raise missing(weight.weight)
