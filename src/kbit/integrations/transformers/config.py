"""KbitConfig: the quantization policy as a transformers quantization config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbit.format.policy import QUANT_METHOD, QuantizationPolicy, policy_fields


@dataclass
class KbitConfig(QuantizationPolicy, QuantizationConfigMixin):
    """What to quantize to how many bits: a `QuantizationPolicy` that transformers understands.

    Args, all of them optional:
        bits: width of most layers, 2 to 5; 4 by default.
        overrides: {regular expression: bits} for modules whose name it is found in; 0 leaves them out.
        modules_to_not_convert: names of modules that stay as they are, with all inside them.
        embedding_bits: width of embeddings and output head, which else stay as they are.
        codebook: "nf" (normal-float, the default), "bof" (block-wise optimal float), 2^bits levels, or
            {bits: levels}.
        search: search block scales (default) or take each block's largest weight.
        absmax_format: of block scales, "e4m4" (a byte, the default), "float16" or "float32".

    >>> config = kbit.KbitConfig(bits=4, overrides={r"down_proj": 5})
    >>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    """

    # A field of the mixin without a default, which type checkers would want as an argument.
    quant_method: str = field(  # type: ignore[misc]  # of the class in the policy
        default=QUANT_METHOD, init=False, repr=False, compare=False
    )

    def get(self, key: str, default: Any = None) -> Any:
        """A field as `to_dict` has it; transformers asks configs so, as if they were dicts."""
        return self.to_dict().get(key, default)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read a checkpoint's `quantization_config`.

        Returns:
            The config; with `return_unused_kwargs`, also the keyword arguments that are no field of it.

        Raises:
            TypeError, ValueError: not a kbit config, a newer version, an unknown field, a value out of range.
        """
        fields = policy_fields(config)
        settings = QuantizationPolicy.__dataclass_fields__
        known = {key: kwargs.pop(key) for key in list(kwargs) if key in settings}
        result = cls(**{**fields, **known})
        return (result, kwargs) if return_unused_kwargs else result
