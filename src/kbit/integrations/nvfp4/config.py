"""NVFP4Config: settings of NVFP4 layers, and which modules get them, as a transformers quantization
config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from kbit.format.embeddings import is_head
from kbit.format.policy import ROUTERS
from kbit.format.skips import names_to_skip, why_skipped
from kbit.nvfp4.layers import NVFP4Settings
from kbit.nvfp4.readers import stored

QUANT_METHOD = stored.KBIT
FORMAT_VERSION = 1


@dataclass
class NVFP4Config(NVFP4Settings, QuantizationConfigMixin):
    """How NVFP4 layers compute, and which modules become such.

    Attributes:
        activations: "nvfp4" (W4A4), or "16bit" (W4A16; see `linear_nvfp4`).
        accum: accumulation contract of W4A4 products, "exact", "seq16" or "tc".
        search: try neighbouring block scales, of weights and activations.
        ties: halfway magnitudes go toward "zero", or to the "even" code.
        row_scale: give each row of activations a float32 factor; without it, activations below 0.1 lose
            accuracy.
        dedup: how activations are quantized for experts, "off", "gather", "scatter" or
            "indirect"; changes no bit.
        fold: quantize silu(gate) * up in the kernel that computes it; changes no bit, needs row_scale off.
        modules_to_not_convert: names, as in `QuantizationPolicy`; a module is skipped if one of them is its
            name or that of a parent. Routers and the output head are always skipped.

    Raises:
        TypeError, ValueError: a field is out of range; the message names it.
    """

    modules_to_not_convert: list[str] | None = None

    # A field of the mixin without a default, which type checkers would want as an argument.
    quant_method: str = field(default=QUANT_METHOD, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.modules_to_not_convert = names_to_skip(self.modules_to_not_convert)

    def settings(self) -> NVFP4Settings:
        """What the layers need of it."""
        return NVFP4Settings(**{each.name: getattr(self, each.name) for each in fields(NVFP4Settings)})

    def chooses(self, *names: str) -> bool:
        """Whether a module is to be quantized.

        Args:
            names: its dotted name in the model and, where a checkpoint's files call it otherwise, that too.
        """
        return self.why_not(*names) is None

    def why_not(self, *names: str) -> str | None:
        """Why `chooses` is False for a module of these names, in a few words; None where it is True.

        >>> NVFP4Config().why_not("lm_head")
        'it is the output head'
        """
        if (skipped := why_skipped(names, self.modules_to_not_convert)) is not None:
            return skipped
        if any(ROUTERS.search(name) for name in names):
            return "it is a router"
        return "it is the output head" if any(map(is_head, names)) else None

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint's config.json holds."""
        return {"quant_method": QUANT_METHOD, "version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Read a checkpoint's `quantization_config`.

        Returns:
            The config; with `return_unused_kwargs`, also the keyword arguments that are no field of it.

        Raises:
            TypeError, ValueError: another method, a newer version, an unknown field, a value out of range.
        """
        if not isinstance(config, Mapping):
            raise TypeError(f"quantization_config must be an object, got {type(config).__name__}.")
        values = dict(config)
        method, version = values.pop("quant_method", QUANT_METHOD), values.pop("version", FORMAT_VERSION)
        if method != QUANT_METHOD or type(version) is not int or version != FORMAT_VERSION:
            raise ValueError(
                f"quantization_config: expected {QUANT_METHOD} of version {FORMAT_VERSION}, got {method!r} "
                f"of version {version!r}. Update kbit, or load with the library that wrote it."
            )
        known = {each.name for each in fields(cls) if each.init}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ValueError(f"quantization_config: unknown field {unknown[0]!r}; known: {sorted(known)}.")
        own = {key: kwargs.pop(key) for key in list(kwargs) if key in known}
        result = cls(**{**values, **own})
        return (result, kwargs) if return_unused_kwargs else result
