"""KbitConfig: the quantization policy as a transformers quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbit.format.policy import QUANT_METHOD, QuantizationPolicy, policy_fields


@dataclass
class KbitConfig(QuantizationPolicy, QuantizationConfigMixin):
    """What to quantize to how many bits; see `QuantizationPolicy` for the fields.

    >>> config = kbit.KbitConfig(bits=4, overrides={r"down_proj": 5})
    >>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    """

    quant_method: ClassVar[str] = QUANT_METHOD

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read a checkpoint's `quantization_config`.

        Returns:
            The config; with `return_unused_kwargs`, also the keyword arguments that are no field of it.

        Raises:
            TypeError, ValueError: not a kbit config, a newer version, an unknown field, a value out of range.
        """
        fields = policy_fields(config)
        known = {key: kwargs.pop(key) for key in list(kwargs) if key in cls.__dataclass_fields__}
        result = cls(**{**fields, **known})
        return (result, kwargs) if return_unused_kwargs else result
