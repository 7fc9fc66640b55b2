"""`tie_weights` of models with quantized tables or heads: which of them may have been replaced since.

transformers ties parameters by names that it wrote down when the model was made or converted. What has such a
name by now may be codes of another width, or a 16-bit weight. So each pair is looked at anew, and the target
gets what the source has, as in any model: its codes with their scales, factor and codebook, or its weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from kbit.format.names import ABSMAX, PACKED, PARTS, SCALE, original_of
from kbit.integrations.on_import import wrap_method
from kbit.nn import KbitEmbedding, KbitLinear
from kbit.nn.mixins import stand_in
from kbit.nn.parts import QuantizedModule
from kbit.nn.support import keep_device_hook, keep_hooks, left_alone, names_of_modules, unsupported

_CALLER = 4  # of tie_weights, from where it warns


class _End(NamedTuple):
    """A layer of a tied pair, without the adapters around it, and the name of its weight."""

    path: str
    layer: Any
    name: str
    has_adapter: bool

    @classmethod
    def of(cls, model: nn.Module, parameter: str) -> _End:
        path, _, name = parameter.rpartition(".")
        try:
            layer: Any = model.get_submodule(path)
        except AttributeError:  # somebody took it away
            layer = None
        inside = layer
        while isinstance(base := getattr(inside, "base_layer", None), nn.Module):
            inside = base
        return cls(path, inside, name, inside is not layer)

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.layer, QuantizedModule) and self.name in self.layer.shapes  # no bias

    def __str__(self) -> str:
        return f"{self.path} ({f'{self.layer.bits} bits' if self.is_quantized else 'unquantized'})"


def guard_tying(module: ModuleType) -> None:
    """Have transformers tie quantized layers as a whole, by what they are when it is asked to.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "tie_weights", _guarded)


def rename_ties(model: Any) -> None:
    """Tell transformers what is tied by the names it has now: of weights, or of the parts of their codes."""
    known = _of_weights(getattr(model, "all_tied_weights_keys", None))
    parts = {target: _parts_of(model, target, source) for target, source in known.items()}
    for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
        names = getattr(model, attribute, None)
        if isinstance(names, dict):
            renamed = {
                target + part: source + part
                for target, source in _of_weights(names).items()
                for part in parts.get(target, ("",))
            }
            if renamed != names:
                setattr(model, attribute, renamed)


def _of_weights(names: Any) -> dict[str, str]:
    """Tied names, those of parts as those of weights; none of what old models on the Hub list."""
    pairs = names.items() if isinstance(names, dict) else ()
    return {original_of(target): original_of(source) for target, source in pairs}


def _parts_of(model: Any, target: str, source: str) -> tuple[str, ...]:
    """Suffixes of a tied weight's parts; of one that is not quantized at both ends, of its only name."""
    one, other = _End.of(model, target), _End.of(model, source)
    if not (one.is_quantized and other.is_quantized):
        return ("",)
    return (PACKED, ABSMAX, SCALE) if one.name + SCALE in one.layer._parameters else (PACKED, ABSMAX)


def _guarded(original: Any) -> Any:
    def tie_weights(self: Any, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        # Loading says what files lacked. It ties what `placement` has built alike.
        if missing_keys is not None or not _may_have_codes(self):
            original(self, missing_keys, recompute_mapping)
        else:
            _tie(self, original, recompute_mapping)

    return tie_weights


def _may_have_codes(model: Any) -> bool:
    """Whether a model has quantized layers, or had: transformers may know the names of their parts."""
    names = getattr(model, "all_tied_weights_keys", None) or {}
    return _of_weights(names) != names or any(isinstance(one, QuantizedModule) for one in model.modules())


def _declared(model: Any) -> Iterator[tuple[str, str]]:
    """(target, source) of what a model's class, its config, and those of its parts tie, by weights' names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "get_expanded_tied_weights_keys"):
            asked = stand_in(module)
            # Patterns would match a weight's parts, of which one that is not quantized has none.
            names = dict.fromkeys(_names_of_weights(module))
            vars(asked).update(
                _tied_weights_keys=_of_weights(getattr(module, "_tied_weights_keys", None)),
                named_parameters=lambda names=names, **how: names.items(),
                named_buffers=lambda **how: (),
            )
            dot = f"{prefix}." if prefix else ""
            for target, source in asked.get_expanded_tied_weights_keys(all_submodels=False).items():
                yield dot + target, dot + source


def _names_of_weights(model: nn.Module) -> Iterator[str]:
    """Of parameters and buffers, as if nothing were quantized."""
    for path, module in model.named_modules(remove_duplicate=False):
        names = {*module._parameters, *module._buffers}
        if isinstance(module, QuantizedModule):
            names = {original_of(name) for name in names} - {"codebook", "dtype_probe"}
        yield from (f"{path}.{name}" if path else name for name in names)


def _tie(model: Any, original: Any, recompute: bool) -> None:
    """Tie quantized layers, then have transformers tie all else."""
    known = getattr(model, "all_tied_weights_keys", None)
    wanted = dict(_declared(model)) if recompute else _of_weights(known)
    ours = {}
    for target, source in wanted.items():
        ends = _End.of(model, target), _End.of(model, source)
        missing = any(end.layer is None for end in ends)  # which transformers tells
        if not missing and any(end.is_quantized for end in ends):
            _refuse(model, *ends)
            ours[target] = source
    for target, source in ours.items():
        _tie_pair(model, _End.of(model, target), _End.of(model, source))
    model.all_tied_weights_keys = _of_weights(known) | ours
    rename_ties(model)
    known = model.all_tied_weights_keys
    model.all_tied_weights_keys = {one: other for one, other in wanted.items() if one not in ours}
    try:
        original(model, None, recompute_mapping=False)
    finally:
        model.all_tied_weights_keys = known


def _refuse(model: Any, target: _End, source: _End) -> None:
    """Refuse a tie, before any is made, for which the target would have to be a layer that it cannot be.

    Raises:
        ValueError: so.
    """
    if _are_alike(target, source):
        return
    if target.has_adapter:
        reason: str | None = "it is inside an adapter, which was made for it"
    elif type(target.layer) in (KbitLinear, KbitEmbedding):
        return
    else:
        reason = unsupported(target.layer) or left_alone(model).get(target.path)
    if reason:
        raise ValueError(
            f"tie_weights: {target} cannot get the weight of {source}, to which the model's config ties it: "
            f"{reason}. Quantize both or neither, or set config.tie_word_embeddings=False."
        )


def _are_alike(target: _End, source: _End) -> bool:
    """Whether both hold codes of the same shape, which the source can share."""
    if not (target.is_quantized and source.is_quantized):
        return False
    return (target.layer.shapes, target.layer.bits) == (source.layer.shapes, source.layer.bits)


def _tie_pair(model: Any, target: _End, source: _End) -> None:
    """Give the target what the source has; it is another layer then, unless they are alike."""
    layer, other = target.layer, source.layer
    if _are_alike(target, source):
        if not _are_one(layer, other, target.name):
            layer.share(other, target.name)
        return
    made = _with_weight_of(target, source)
    for name in names_of_modules(model)[layer]:
        model.set_submodule(name, made)
    warnings.warn(
        f"kbit: tie_weights replaced {target} by a layer with the weight of {source}, to which the model's "
        f"config ties it. With config.tie_word_embeddings=False they stay two.",
        stacklevel=_CALLER,
    )


def _are_one(layer: Any, other: Any, name: str) -> bool:
    """Whether two quantized layers share a weight already; factors of 1 may be there twice."""
    if layer is other:
        return True
    mine, theirs = ([one._parameters.get(name + part) for part in PARTS] for one in (layer, other))
    return mine[0] is not None and all(one is two for one, two in zip(mine, theirs, strict=True))


def _with_weight_of(target: _End, source: _End) -> nn.Module:
    """What takes the place of a target: a layer of the source's kind of weight, and of its size."""
    layer, weight, coded = target.layer, getattr(source.layer, source.name), source.is_quantized
    rows, columns = source.layer.shapes[source.name] if coded else weight.shape
    settings = {"bits": source.layer.bits, "name": target.path} if coded else {}
    made: Any
    if isinstance(layer, nn.Embedding):
        settings["dtype"] = getattr(layer, "dtype_probe", layer.weight).dtype
        kind: Any = KbitEmbedding if coded else nn.Embedding
        made = kind(rows, columns, layer.padding_idx, device="meta", **settings)
    else:
        kind = KbitLinear if coded else nn.Linear
        made = kind(columns, rows, bias=False, device="meta", **settings)
        made.register_parameter("bias", _bias_of(layer, rows))
    if coded:
        made.share(source.layer)
        made.reset_constants(source.layer.codebook)
    else:
        made.weight = weight
    made.train(layer.training)
    made._is_hf_initialized = True  # transformers draws others anew where a model becomes a part of another
    keep_hooks(layer, made)
    keep_device_hook(layer, made)
    return made


def _bias_of(layer: nn.Linear, rows: int) -> nn.Parameter | None:
    """A head's bias, with zeros for new words, as transformers has it."""
    if layer.bias is not None and len(layer.bias) != rows:
        layer.bias.data = F.pad(layer.bias.data, (0, rows - len(layer.bias)))
    return layer.bias
