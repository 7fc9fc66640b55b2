"""quantize_model: replace a model's layers by quantized ones, in place and layer by layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import nn

from kbit.format.names import all_names
from kbit.format.policy import QuantizationPolicy
from kbit.format.ties import contradictions, why_kept
from kbit.format.unmatched import unmatched
from kbit.nn import leftovers, refusals
from kbit.nn.calibration import Group, Hessians, Sample, calibrated_layer, in_turn
from kbit.nn.embedding import KbitEmbedding
from kbit.nn.experts import KbitExperts
from kbit.nn.fused_experts import is_experts
from kbit.nn.linear import KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.nn.support import keep_device_hook, keep_hooks, left_alone, refuse_mixed, unsupported
from kbit.nn.together import run_together
from kbit.nn.unwrap import unwrapped

Progress = Callable[[int, int, str], None]

# Called before a model is quantized in place, to refuse it with a ValueError.
before_quantizing: list[Callable[[nn.Module], None]] = []

# Called after a model was quantized in place. Integrations add to it, so that a library which the model is of
# learns of the change.
after_quantizing: list[Callable[[nn.Module, QuantizationPolicy], None]] = []

# Asked before a model is quantized: {module: its names in the model's checkpoints} where they are others.
other_names: list[Callable[[nn.Module], Mapping[str, list[str]]]] = []

# Asked before a model is quantized: names of the fused experts that its checkpoints hold fused, too.
fused_experts: list[Callable[[nn.Module], Collection[str]]] = []

NOTHING_QUANTIZED = (
    "kbit quantized no layer: the model has none that can be, or the policy leaves them out. Check "
    "modules_to_not_convert, overrides and embedding_bits."
)


def empty_like(
    module: nn.Module, bits: int, absmax_format: str, name: str, device: str | None = None
) -> QuantizedModule:
    """The quantized counterpart of a supported module, with empty parts and its hooks."""
    layer: QuantizedModule
    if isinstance(module, nn.Linear):
        layer = KbitLinear.empty_like(module, bits, absmax_format, name, device)
    elif isinstance(module, nn.Embedding):
        layer = KbitEmbedding.empty_like(module, bits, absmax_format, name, device)
    else:
        layer = KbitExperts.empty_like(module, bits, absmax_format, name, device)
    keep_hooks(module, layer)
    return layer


_CALLER = 3  # of quantize_model, from inside it: between them is torch's decorator


@torch.inference_mode(False)  # gradients may be asked for later
def quantize_model(
    model: nn.Module,
    policy: QuantizationPolicy,
    progress: Progress | None = None,
    calibration: Sequence[Sample] | None = None,
) -> nn.Module:
    """Replace linear layers, embeddings and fused experts by quantized ones, in place.

    Each layer's 16-bit weight is freed as soon as its codes exist, so the peak is the model plus one layer.
    Layers that share a weight (a tied output head) share the quantized one (`kbit.format.ties`). Hooks on
    calls stay. Routers beside experts stay 16-bit, and on a GPU run by own kernels (`kbit.nn.router`); there
    layers of one input, such as q, k and v, run as one (`kbit.nn.merged`).

    Args:
        model: any nn.Module with weights on a real device, or what torch.compile made of one; not itself a
            linear layer.
        policy: which modules get how many bits; see `QuantizationPolicy.bits_for`. It sees the names of this
            model's modules and, of a model of transformers, those in its checkpoints, which differ for a few.
        progress: called as progress(done, total, name) after each layer.
        calibration: sample inputs, on the model's device: tensors of ids, or positional or keyword arguments.
            Linear layers and experts are then quantized by what they are fed (`kbit.quantizers.calibrated`).

    Returns:
        The model.

    Raises:
        NonFiniteWeightError: a weight holds NaN or Inf. Nothing is quantized yet, as for what follows.
        TypeError: the model is no module, has one of torch.jit, or is wrapped for data parallelism; the
            policy is no policy, `progress` no function, or a weight of another dtype than float32 or 16 bits.
        ValueError: the model itself is a layer, or holds weights on the meta device; samples feed NaN or Inf
            to a layer; the policy gives weights of one module, which files have apart, different widths; the
            model has adapters of peft, another method's layers, or those of another codebook or scale format.

    Warns:
        UserWarning: large parameters stay that the policy would quantize; an override or a skip matches no
            module, or an override is for a tied weight that has other bits; the model has no quantized layer
            in the end; or all were before, some with other bits, another codebook or format of scales.

    >>> kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"quantize_model: model must be an nn.Module, got {type(model).__name__}. kbit.quantize "
            f"takes single tensors; the command kbit quantize takes folders."
        )
    given, model = model, unwrapped(model)
    refusals.refuse_parallel(model, "quantize_model")
    refusals.refuse_scripted(model)
    refusals.require_policy(policy, "quantize_model")
    refusals.require_progress(progress, "quantize_model")
    for check in before_quantizing:
        check(model)
    names = {name: stored for ask in other_names for name, stored in ask(model).items()}
    fused = {name for ask in fused_experts for name in ask(model)}
    layers = _layers(model)
    _warn_about_names(model, policy, layers, names)
    groups = _with_bits(model, layers, policy, names)
    kept = None if groups else refusals.other_settings(model, policy, lambda n: _width(n, policy, names))
    if kept is not None:
        warnings.warn(kept, stacklevel=_CALLER)
    refusals.refuse_other_format(model, policy, {bits for bits, _ in groups})
    refusals.refuse_weights({names[0]: model.get_submodule(names[0]) for _, names in groups})
    for done, (group, fed) in enumerate(in_turn(model, groups, calibration), start=1):
        _replace_group(model, group, policy, fused, fed)
        if progress is not None:
            progress(done, len(groups), group[1][0])
    run_together(model)
    found = leftovers.warning(model, policy, names)
    if found is not None:
        warnings.warn(found, stacklevel=_CALLER)
    if not refusals.has_quantized(model):
        warnings.warn(NOTHING_QUANTIZED, stacklevel=_CALLER)
    for tell in after_quantizing:
        tell(model, policy)
    return given


def _layers(model: nn.Module) -> list[list[str]]:
    """The names that lead to one weight, the one that decides first, of all that can be replaced."""
    shared: dict[int, list[str]] = {}
    others: set[int] = set()  # what other modules hold: I-BERT's head has that of a table of its own class
    # A module may have several names; each must lead to the quantized one.
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedModule):
            continue
        if isinstance(module, nn.Linear | nn.Embedding):
            # By its name some would compute the weight anew.
            shared.setdefault(id(module._parameters.get("weight", module)), []).append(name)
        elif is_experts(module):
            shared.setdefault(id(module), []).append(name)
        else:
            others.update(map(id, module.parameters(recurse=False)))
    layers = [
        members
        for key, members in shared.items()
        if key not in others and not any(unsupported(model.get_submodule(name)) for name in members)
    ]
    for members in layers:
        # A tied weight is stored under the embedding's name, so that name decides.
        members.sort(key=lambda name: not isinstance(model.get_submodule(name), nn.Embedding))
    return layers


def _with_bits(
    model: nn.Module, layers: list[list[str]], policy: QuantizationPolicy, names: Mapping[str, list[str]]
) -> list[tuple[int, list[str]]]:
    """(bits, names that lead to one weight) of everything to be replaced."""
    groups = []
    alone = left_alone(model)
    for members in layers:
        kept = why_kept(policy, [all_names(name, names) for name in members])
        bits = None if kept else _width(members[0], policy, names)
        if bits is None or alone.keys() & members:
            continue
        if "" in members:
            raise ValueError(
                "quantize_model replaces layers inside a model; this model is one layer itself. "
                "Use KbitLinear.from_linear or KbitEmbedding.from_embedding."
            )
        groups.append((bits, members))
    return groups


def _width(name: str, policy: QuantizationPolicy, names: Mapping[str, list[str]]) -> int | None:
    """A module's width; None as well where checkpoints have weights of it apart and one stays unquantized."""
    stored = names.get(name, [name])
    found = [(policy.bits_for(each, name), each) for each in stored]
    widths = {bits: each for bits, each in found if bits is not None}
    if any(bits is None for bits, _ in found):
        return None
    refuse_mixed({name: widths})
    return next(iter(widths))


def _replace_group(
    model: nn.Module, group: Group, policy: QuantizationPolicy, fused: Collection[str], fed: Hessians | None
) -> None:
    bits, names = group
    modules = [model.get_submodule(name) for name in names]
    layer = _quantized(modules[0], bits, policy, names[0], names[0] not in fused, fed)
    keep_hooks(modules[0], layer)
    made = {id(modules[0]): layer}
    for name, module in zip(names, modules, strict=True):
        if id(module) not in made:
            made[id(module)] = _tied(module, layer, policy, name)
        model.set_submodule(name, made[id(module)])
    for module in {id(module): module for module in modules}.values():
        keep_device_hook(module, made[id(module)])


def _tied(
    module: nn.Module, layer: QuantizedModule, policy: QuantizationPolicy, name: str
) -> QuantizedModule:
    """The counterpart of a module whose weight is that of `layer`."""
    tied = empty_like(module, layer.bits, policy.absmax_format, name, device="meta")
    tied.share(layer)
    if isinstance(tied, KbitEmbedding):
        tied.reset_constants(layer.codebook)
    return tied


def _quantized(
    module: nn.Module, bits: int, policy: QuantizationPolicy, name: str, apart: bool, fed: Hessians | None
) -> QuantizedModule:
    if fed is not None:
        return calibrated_layer(module, fed, bits, policy, name, apart)
    if is_experts(module):
        return KbitExperts.from_experts(module, bits, policy, name, apart)
    settings = (bits, policy.codebook_for(bits), policy.absmax_format, policy.search, name)
    if isinstance(module, nn.Linear):
        return KbitLinear.from_linear(module, *settings)
    assert isinstance(module, nn.Embedding)
    return KbitEmbedding.from_embedding(module, *settings)


def _warn_about_names(
    model: nn.Module, policy: QuantizationPolicy, layers: list[list[str]], names: Mapping[str, list[str]]
) -> None:
    weights = [[all_names(name, names) for name in members] for members in layers]
    known = [each for holders in weights for each in holders[0]]
    # Of a call before this one; what becomes of another width, `kbit.nn.refusals.other_settings` tells.
    done = [name for name, module in model.named_modules() if isinstance(module, QuantizedModule)]
    known += [each for name in done for each in all_names(name, names)]
    tied = [each for holders in weights for others in holders[1:] for each in others]
    others = [each for name, _ in model.named_modules() for each in all_names(name, names)]
    for found in (unmatched(policy, known, others, tied), contradictions(policy, weights)):
        if found:
            warnings.warn(found, stacklevel=_CALLER + 1)
