"""LoRA on quantized layers: y = x W^T + s (x A^T) B^T, with W in its packed form and only A and B trained.

Hu et al. 2021, "LoRA", on weights frozen in k bits as in Dettmers et al. 2023, "QLoRA". The forward reads
packed weights; the backward decodes a weight for the one product that needs it and drops it again.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.lora.layer import Embedding, Linear
from torch import nn

from kbit.format.autocast import autocast
from kbit.integrations.peft.experts import LoraExperts
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.nvfp4.layers import NVFP4Module

MERGE_REMEDY = (
    "Keep the adapter beside the model, or call kbit.integrations.peft.merge(model): it adds the adapter to "
    "the decoded weights and quantizes them again, or leaves them in 16 bits with requantize=False."
)


def check_config(layer: QuantizedModule, config: Any) -> None:
    """Refuse what would read codes as weights, and layers of which this process holds a part.

    Raises:
        ValueError: the configuration cannot be had on this layer.
    """
    where = layer.layer_name or type(layer).__name__
    if config.init_lora_weights not in (True, False, "gaussian"):
        raise ValueError(
            f"{where}: init_lora_weights={config.init_lora_weights!r} starts from a 16-bit weight, and this "
            f"one is quantized. Use True, False or 'gaussian'."
        )
    for option in ("use_dora", "use_bdlora", "velora_config", "monteclora_config", "kasa_config"):
        if getattr(config, option, None):
            raise ValueError(f"{where}: {option} is not possible on a quantized weight. Use plain LoRA.")
    refuse_split(layer)


def refuse_split(layer: nn.Module) -> None:
    """Refuse a layer of which this process holds a part: what it would train fits no other number of ranks.

    Raises:
        ValueError: it is one.
    """
    if isinstance(layer, QuantizedModule) and hasattr(layer, "split"):
        raise ValueError(
            f"{layer.layer_name or type(layer).__name__} is split over ranks; adapters and prompts train on "
            f"whole layers. Load the model without tp_plan or distributed_config."
        )


class LoraOnCodes:
    """What adapters on codes have in common: they refuse what would read codes as a weight, or write them.

    Codes cannot take a small update in place: most of it would round to nothing.
    """

    base_layer: Any
    get_base_layer: Any

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter; see peft.

        Raises:
            ValueError: the configuration needs the 16-bit weight.
        """
        check_config(self.get_base_layer(), config)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)  # type: ignore[misc]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse: codes cannot be merged in place.

        Raises:
            ValueError: always; the message says what to do.
        """
        name = self.base_layer.layer_name or type(self.base_layer).__name__
        raise ValueError(f"{name}: an adapter cannot be merged into codes in place. {MERGE_REMEDY}")

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> Any:
        """Return the layer without adapters.

        Raises:
            ValueError: `merge` is set; the message says what to do.
        """
        if merge:
            self.merge(safe_merge, adapter_names)
        return self.base_layer


class LoraLinear(LoraOnCodes, Linear):
    """peft's LoRA on a KbitLinear."""

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        if config.fan_in_fan_out:  # of weights [in, out], and codes are of [out, in], as nn.Linear's weight
            warnings.warn(
                "fan_in_fan_out is set to True but the target module is `kbit.nn.KbitLinear`. Setting "
                "fan_in_fan_out to False.",
                stacklevel=2,
            )
            config.fan_in_fan_out = False
        super().__init__(base_layer, adapter_name, config, *args, **kwargs)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in autocast's dtype where that is on."""
        return super().forward(autocast(x), *args, **kwargs)


class LoraEmbedding(LoraOnCodes, Embedding):
    """peft's LoRA on a KbitEmbedding."""


class LoraKbitExperts(LoraOnCodes, LoraExperts):
    """LoRA on KbitExperts, one pair of small matrices per expert and projection."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        adapter_names: list[str] | None = None,
    ) -> torch.Tensor:
        """Like KbitExperts', in autocast's dtype where that is on.

        Raises:
            NotImplementedError: there are adapter_names, which peft has for an adapter for each row.
        """
        if adapter_names is not None:
            raise NotImplementedError(
                f"{self.get_base_layer().layer_name}: adapter_names, an adapter for each row, is not "
                "possible with adapted experts. Use set_adapter, or adapt linear layers alone."
            )
        return super().forward(autocast(hidden_states), top_k_index, top_k_weights)


def _refuse_nvfp4(layer: NVFP4Module, *_: Any, **named: Any) -> None:
    raise ValueError(
        f"{layer.layer_name or type(layer).__name__} is in NVFP4, to which peft cannot add an adapter. "
        f"Quantize the model by kbit.KbitConfig(bits=4) to train one."
    )


LAYERS: dict[type, Any] = {
    KbitLinear: LoraLinear,
    KbitEmbedding: LoraEmbedding,
    KbitExperts: LoraKbitExperts,
    NVFP4Module: _refuse_nvfp4,
}
