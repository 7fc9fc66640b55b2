"""QuantizationPolicy: which modules become how many bits. A checkpoint's `quantization_config` holds it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from kbit.format import patterns
from kbit.format.codebook import BLOCK_SIZE, check_bits, get_codebook
from kbit.format.embeddings import is_embedding
from kbit.format.scales import absmax_format
from kbit.format.skips import is_inside, names_to_skip, why_skipped

QUANT_METHOD = "kbit"
FORMAT_VERSION = 1

# Never quantized unless an override names them: routers decide where tokens go and are tiny, and some read
# the weight of a layer in them (gate.wg of HunYuan-MoE, router.classifier of LongCat).
ROUTERS = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")

Codebook = str | Sequence[float] | Mapping[int, Sequence[float]]


@dataclass
class QuantizationPolicy:
    """Which modules are quantized, and how.

    Attributes:
        bits: width of every quantized module that no override names.
        codebook: name of a codebook, 2^bits numbers, or {bits: numbers} when several widths are used.
        absmax_format: block scale format, "e4m4" (one byte), "float16" or "float32".
        search: search block scales (default) or take the rounded absmax (plain).
        overrides: {regular expression: bits}; the first that `re.search` finds in a name of the module wins.
            0 leaves the module unquantized. A repeated group may hold no other repeat, and no alternatives.
        modules_to_not_convert: names; a module is skipped if one of them is a name of it or of its parents.
        embedding_bits: width of embeddings and output heads, known by their names (`kbit.format.embeddings`);
            None leaves them unquantized. Those with other names are modules like any other.

    Raises:
        TypeError, ValueError: a field is out of range; the message names it.
    """

    quant_method: ClassVar[str] = QUANT_METHOD  # by which transformers finds what loads

    bits: int = 4
    codebook: Codebook = "nf"
    absmax_format: str = "e4m4"
    search: bool = True
    overrides: dict[str, int] = field(default_factory=dict)
    modules_to_not_convert: list[str] | None = None
    embedding_bits: int | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field.

        Raises:
            TypeError, ValueError: see the class.
        """
        self.overrides = patterns.in_order(self.overrides)
        stated = self.codebook if isinstance(self.codebook, Mapping) else ()
        for width in (*self.widths(), *map(_integer, stated)):
            get_codebook(self._codebook_entry(check_bits(width, "a width of codebook")), width)
        self.codebook = _in_numbers(self.codebook)
        for pattern in self.overrides:
            patterns.check(pattern)
        absmax_format(str(self.absmax_format))  # a name, not the dtype
        if not isinstance(self.search, bool):
            raise TypeError(f"search must be True or False, got {self.search!r}.")
        self.modules_to_not_convert = names_to_skip(self.modules_to_not_convert)

    def widths(self) -> list[int]:
        """Every width this policy can assign, ascending.

        Raises:
            ValueError: one of them is not in 2..5.
        """
        used = {check_bits(self.bits)}
        if self.embedding_bits is not None:
            used.add(check_bits(self.embedding_bits, "embedding_bits"))
        for pattern, bits in self.overrides.items():
            if type(bits) is not int or bits != 0:  # False is no 0
                used.add(check_bits(bits, f"overrides[{pattern!r}]", or_0="stay unquantized"))
        return sorted(used)

    def bits_for(self, *names: str) -> int | None:
        """The width of a module, or None where it stays unquantized.

        Args:
            names: dotted names of one linear, embedding or experts module, without ".weight": the one in a
                checkpoint's files and, where the model calls it otherwise, that one too. What is found in any
                of them counts, and their order does not.

        Raises:
            ValueError: an override may take forever to look for in a name so long.
        """
        decided = self._decide(names)
        return decided if isinstance(decided, int) else None

    def why_not(self, *names: str) -> str | None:
        """Why `bits_for` is None for a module, in a few words; None where it has a width.

        >>> QuantizationPolicy().why_not("lm_head")
        'the default; embedding_bits=5 quantizes it'
        """
        decided = self._decide(names)
        return decided if isinstance(decided, str) else None

    def explicit(self, *names: str) -> int | str | None:
        """What skips and overrides say of a module: its width, or why it has none; None if they say nothing.

        Args:
            names: see `bits_for`.

        Raises:
            ValueError: see `bits_for`.
        """
        if (skipped := why_skipped(names, self.modules_to_not_convert)) is not None:
            return skipped
        found = patterns.first_found(self.overrides, names)
        return None if found is None else self.overrides[found] or f"the override {found!r} is 0"

    def _decide(self, names: Sequence[str]) -> int | str:
        """The width of a module, or why it has none."""
        said = self.explicit(*names)
        if said is not None:
            return said
        if any(ROUTERS.search(name) for name in names):
            return "it is a router"
        if any(map(is_embedding, names)):
            return self.embedding_bits or "the default; embedding_bits=5 quantizes it"
        return self.bits

    def stating(
        self,
        widths: Mapping[str, int],
        levels: Mapping[int, Sequence[float]] | None = None,
        absmax_format: str | None = None,
    ) -> QuantizationPolicy:
        """This policy as a checkpoint's config holds it: names in the files alone give modules their widths.

        A width may have been decided by the name that the model has for a module, or by an earlier policy.
        Where the name in the files would give another, an override for it comes first; layers that are alike
        share one.

        Args:
            widths: {name of a quantized module in the files: its bits}.
            levels: {bits: codebook} of the modules; None if this policy's are theirs.
            absmax_format: of the modules' block scales; None if this policy's is theirs.

        >>> QuantizationPolicy(overrides={r"mlp": 3}).stating({"layers.0.moe.experts": 3}).overrides
        {'^layers\\.\\d+\\.moe\\.experts$': 3, 'mlp': 3}
        """
        layers: dict[str, set[int]] = {}
        for name, bits in widths.items():
            layers.setdefault(_of_every_layer(name), set()).add(bits)
        said: dict[str, int] = {}
        for name, bits in widths.items():
            if self.bits_for(name) != bits:
                pattern = _of_every_layer(name)
                said[pattern if len(layers[pattern]) == 1 else f"^{re.escape(name)}$"] = bits
        changes: dict[str, Any] = {}
        if said:
            changes["overrides"] = said | {p: bits for p, bits in self.overrides.items() if p not in said}
        skips = self.modules_to_not_convert or []
        needed = [skip for skip in skips if not any(is_inside(name, skip) for name in widths)]
        if len(needed) < len(skips):
            changes["modules_to_not_convert"] = needed
        if any(self._levels(bits) != list(used) for bits, used in (levels or {}).items()):
            changes["codebook"] = {bits: self._levels(bits) for bits in self.widths()} | dict(levels or {})
        if absmax_format not in (None, self.absmax_format):
            changes["absmax_format"] = absmax_format
        return replace(self, **changes) if changes else self

    def codebook_for(self, bits: int) -> torch.Tensor:
        """float32 [2^bits]: the codebook used at a width."""
        return get_codebook(self._codebook_entry(bits), bits)

    def _levels(self, bits: int) -> list[float] | None:
        """The codebook of a width; None if this policy has none for it."""
        try:
            return self.codebook_for(bits).tolist()
        except ValueError:
            return None

    def _codebook_entry(self, bits: int) -> str | Sequence[float]:
        if isinstance(self.codebook, Mapping):
            # JSON turns integer keys into strings.
            by_width = {str(width): levels for width, levels in self.codebook.items()}
            if str(bits) not in by_width:
                known = ", ".join(sorted(by_width))
                raise ValueError(f"codebook: no levels for {bits} bits, only for {known}. Add them.")
            levels = by_width[str(bits)]
            if isinstance(levels, str):
                raise TypeError(
                    f"codebook: {bits} bits need {2**bits} numbers, got {levels!r}. A name is that of every "
                    f"width: codebook={levels!r}."
                )
            return levels
        return self.codebook

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` holds under `quantization_config`."""
        codebook: Any = self.codebook
        if isinstance(codebook, Mapping):
            codebook = {str(width): list(map(float, levels)) for width, levels in codebook.items()}
        elif not isinstance(codebook, str):
            codebook = list(map(float, codebook))
        return {
            "quant_method": QUANT_METHOD,
            "version": FORMAT_VERSION,
            "bits": self.bits,
            "block_size": BLOCK_SIZE,
            "codebook": codebook,
            "absmax_format": self.absmax_format,
            "search": self.search,
            "overrides": patterns.for_json(self.overrides),
            "modules_to_not_convert": self.modules_to_not_convert and list(self.modules_to_not_convert),
            "embedding_bits": self.embedding_bits,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> QuantizationPolicy:
        """Read a checkpoint's `quantization_config`.

        Raises:
            TypeError, ValueError: not a kbit config, a newer version, an unknown block size or field.
        """
        return cls(**policy_fields(config))


def _in_numbers(codebook: Any) -> Any:
    """A codebook, or one for each width, without tensors and arrays, since policies are compared."""
    if isinstance(codebook, Mapping):
        return {_integer(width): _in_numbers(levels) for width, levels in codebook.items()}
    return codebook.tolist() if hasattr(codebook, "tolist") else codebook


def _integer(bits: Any) -> Any:
    """The width that a key of a codebook names, also if JSON made it a string."""
    return int(bits) if isinstance(bits, str) and bits.isdecimal() else bits


def _of_every_layer(name: str) -> str:
    """A regular expression for a module's name whatever the layers' numbers."""
    parts = (r"\d+" if part.isdigit() else re.escape(part) for part in name.split("."))
    return "^" + r"\.".join(parts) + "$"


def policy_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor arguments in a `quantization_config`, after checking what is not a field.

    Raises:
        TypeError: no object.
        ValueError: another method or version, another block size, an unknown key.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"quantization_config must be an object, got {type(config).__name__}.")
    values = dict(config)
    method = values.pop("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise ValueError(
            f"quantization_config: quant_method is {method!r}, and this reads {QUANT_METHOD!r} alone. Other "
            f"formats are not converted: quantize the unquantized model."
        )
    version = values.pop("version", FORMAT_VERSION)
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
        raise ValueError(
            f"quantization_config: format version {version!r}, this kbit reads whole numbers from 1 to "
            f"{FORMAT_VERSION}. Upgrade kbit if it is higher; else fetch or quantize the model again."
        )
    block_size = values.pop("block_size", BLOCK_SIZE)
    if block_size != BLOCK_SIZE:
        raise ValueError(f"quantization_config: block_size is {block_size!r}, the format has {BLOCK_SIZE}.")
    unknown = set(values) - set(QuantizationPolicy.__dataclass_fields__)
    if unknown:
        raise ValueError(f"quantization_config: unknown keys {sorted(unknown)}. Upgrade kbit?")
    return values
