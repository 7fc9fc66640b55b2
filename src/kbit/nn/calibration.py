"""Quantizing layers by what sample inputs feed them; see `kbit.quantizers.calibrated`.

Layers are taken in the model's order, as many at a time as their sums of x x^T fit in `HESSIAN_BYTES`. Each
time the model runs on all samples as far as these layers, with those in front quantized already.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from kbit.format.autocast import without_autocast
from kbit.format.codebook import get_codebook
from kbit.format.errors import NonFiniteWeightError
from kbit.format.policy import QuantizationPolicy
from kbit.format.tensor import QuantizedTensor
from kbit.nn.early_end import ending_early
from kbit.nn.experts import KbitExperts
from kbit.nn.fuse import Parts, fuse_rows, parts_of
from kbit.nn.fused_experts import WEIGHTS, is_experts
from kbit.nn.linear import KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.quantizers import calibrated

HESSIAN_BYTES = 4 * 2**30
_EXPERT_BYTES = 2**30  # of H, in float64, of experts whose errors are spread at once

# What a model is called with: ids, or positional or keyword arguments.
Sample = torch.Tensor | Sequence[Any] | Mapping[str, Any]
Group = tuple[int, list[str]]  # bits, and the names that lead to one weight


class Hessians:
    """Sums of x x^T over the activations x of a module's weights: float32 [K, K], or [E, K, K] of experts.

    And how many activations there were, [] or [E].

    Args:
        module: a linear layer or fused experts.
        name: its name in its model, for messages.
    """

    def __init__(self, module: nn.Module, name: str = "") -> None:
        self.name = name
        self.sums = {
            name: torch.zeros(_shape_of_sums(weight), dtype=torch.float32, device=weight.device)
            for name, weight in _weights(module).items()
        }
        self.counts = {
            name: torch.zeros(sums.shape[:-2], dtype=torch.float64, device="cpu")
            for name, sums in self.sums.items()
        }

    def watch(self, module: nn.Module) -> Any:
        """Have a module's calls add to the sums; returns the hook's handle."""
        if is_experts(module):
            return module.register_forward_pre_hook(self._add_routed, with_kwargs=True)
        return module.register_forward_pre_hook(self._add_input, with_kwargs=True)

    def _add(self, name: str, x: torch.Tensor, expert: int | None = None) -> None:
        rows = x.reshape(-1, x.shape[-1]).float()
        with without_autocast(rows.device):
            self.sums[name][... if expert is None else expert] += rows.t() @ rows
        self.counts[name][... if expert is None else expert] += len(rows)

    def _check(self, key: str, x: torch.Tensor) -> None:
        """Check x before it is multiplied here: the module, which would say more, is called later."""
        columns = self.sums[key].shape[-1]
        if x.dim() < 1 or x.shape[-1] != columns:
            raise ValueError(f"{self.name} takes [..., {columns}], got {tuple(x.shape)}.")

    def _add_input(self, module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        x = inputs[0] if inputs else named["input"]
        self._check("weight", x)
        self._add("weight", x)

    def _add_routed(self, module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        given = dict(zip(("hidden_states", "top_k_index"), inputs, strict=False)) | dict(named)
        x, ids = given["hidden_states"], given["top_k_index"]
        self._check("gate_up_proj", x)
        for expert, weight in enumerate(module.gate_up_proj):
            mine = x[(ids == expert).any(-1)]
            if len(mine):
                gate, up = nn.functional.linear(mine, weight).chunk(2, dim=-1)
                self._add("gate_up_proj", mine, expert)
                self._add("down_proj", module.act_fn(gate) * up, expert)


def _weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: module.get_parameter(name) for name in (WEIGHTS if is_experts(module) else ("weight",))}


def _shape_of_sums(weight: torch.Tensor) -> tuple[int, ...]:
    return (*weight.shape[:-2], weight.shape[-1], weight.shape[-1])


def _hessian_bytes(module: nn.Module) -> int:
    if isinstance(module, nn.Embedding):
        return 0
    return sum(4 * math.prod(_shape_of_sums(weight)) for weight in _weights(module).values())


def in_turn(
    model: nn.Module, groups: Sequence[Group], samples: Sequence[Sample] | None
) -> Iterator[tuple[Group, Hessians | None]]:
    """Each group, and what the samples feed its first module; None for an embedding, or without samples.

    A group must be replaced before the next one is asked for.

    Args:
        model: the model that the groups are of.
        groups: what is to be quantized, in the model's order.
        samples: what to call the model with.

    Raises:
        TypeError: the samples are no list.
        ValueError: there are none, or a layer's activations are not finite.
        TypeError, ValueError, RuntimeError: the model raises one of them on a sample; the message says which.
    """
    if samples is None:
        yield from ((group, None) for group in groups)
        return
    if not isinstance(samples, list | tuple):
        raise TypeError(
            f"quantize_model: calibration must be a list of samples, got {type(samples).__name__}. Of ids "
            f"[n, T]: list(ids.split(1))."
        )
    if not samples:
        raise ValueError("quantize_model: calibration has no samples. Give some, or None.")
    for sample in samples:
        _check(sample)
    first = 0
    while first < len(groups):
        last, room = first, HESSIAN_BYTES
        while last < len(groups):
            room -= _hessian_bytes(model.get_submodule(groups[last][1][0]))
            if room < 0 and last > first:
                break
            last += 1
        found = _collected(model, [names[0] for _, names in groups[first:last]], samples)
        for group in groups[first:last]:
            yield group, found.pop(group[1][0], None)
        first = last


@torch.no_grad()
def _collected(model: nn.Module, names: list[str], samples: Sequence[Sample]) -> dict[str, Hessians]:
    modules = {name: model.get_submodule(name) for name in names}
    found = {name: Hessians(m, name) for name, m in modules.items() if not isinstance(m, nn.Embedding)}
    handles = [hessians.watch(modules[name]) for name, hessians in found.items()]
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        if found:
            with ending_early(model, [*found]) as run:
                for index, sample in enumerate(samples):
                    run(functools.partial(_call_with, model, sample, index))
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    for name, hessians in found.items():
        if not all(bool(torch.isfinite(sums).all()) for sums in hessians.sums.values()):
            raise ValueError(
                f"quantize_model: the samples feed NaN or Inf to {name}, so it cannot be calibrated. Is the "
                f"unquantized model sound in its dtype?"
            )
    return found


def _check(sample: Any) -> None:
    """Raise for a sample that no model is called with: a text, an array, or ids without a batch."""
    if isinstance(sample, str):
        raise TypeError(
            "quantize_model: a calibration sample is a text. Give the tokenizer's ids of it, [1, T]."
        )
    if not isinstance(sample, torch.Tensor | list | tuple | Mapping):
        raise TypeError(
            f"quantize_model: a calibration sample must be a tensor, or the model's arguments in a tuple or "
            f"a dict, got {type(sample).__name__}. Of an array: torch.as_tensor(array)."
        )
    arguments = dict(sample) if isinstance(sample, Mapping) else sample  # what a tokenizer gives is no dict
    if not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(arguments)):
        raise TypeError(
            "quantize_model: a calibration sample has no tensor in it. Of ids: torch.tensor(ids), [B, T]."
        )
    if isinstance(sample, torch.Tensor) and sample.dim() == 1 and not sample.is_floating_point():
        raise ValueError(
            f"quantize_model: a calibration sample must be a batch of ids [B, T], got {tuple(sample.shape)}. "
            f"Of ids [n, T]: list(ids.split(1))."
        )


def _call(model: nn.Module, sample: Sample) -> None:
    if isinstance(sample, Mapping):
        model(**sample)
    elif isinstance(sample, torch.Tensor):
        model(sample)
    else:
        model(*sample)


def _call_with(model: nn.Module, sample: Sample, index: int) -> None:
    """Call a model with a sample; what it raises then says which one."""
    try:
        _call(model, sample)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        kind = type(error)
        if kind not in (TypeError, ValueError, RuntimeError, IndexError, KeyError):
            raise  # it may be made of other arguments
        words = repr(error) if kind is KeyError else str(error).removesuffix(".")
        raise (ValueError if kind is KeyError else kind)(
            f"quantize_model: the model fails on calibration[{index}]: {words}. Give samples that it can be "
            f"called with{', of ids in its vocabulary' if kind is IndexError else ''}."
        ) from error


@torch.no_grad()
def calibrated_layer(
    module: nn.Module, hessians: Hessians, bits: int, policy: QuantizationPolicy, name: str, apart: bool
) -> QuantizedModule:
    """Quantize a module by what it is fed.

    Args:
        module: a linear layer or fused experts.
        hessians: of its activations.
        bits, policy, name, apart: as in `KbitExperts.from_experts`.

    Raises:
        ValueError: what is spread over a weight's columns holds NaN or Inf.
    """
    kind: Any = KbitLinear if isinstance(module, nn.Linear) else KbitExperts
    layer: QuantizedModule = kind.empty_like(module, bits, policy.absmax_format, name, device="meta")
    for key, weight in _weights(module).items():
        sums, counts = hessians.sums.pop(key), hessians.counts[key]
        try:
            if weight.dim() == 2:
                parts = parts_of(_matrices(weight, calibrated.spread_of(sums, counts), bits, policy))
            else:
                parts = _experts(weight, (sums, counts), WEIGHTS[key] if apart else 1, bits, policy)
        except NonFiniteWeightError:
            raise ValueError(
                f"quantize_model: errors that are spread over the columns of {name}.{key} became NaN or Inf. "
                f"Its weights are finite: give other samples, or leave out calibration."
            ) from None
        layer.fill(key, parts)
    return layer


def _experts(
    w: torch.Tensor,
    seen: tuple[torch.Tensor, torch.Tensor],
    above: int,
    bits: int,
    policy: QuantizationPolicy,
) -> Parts:
    """Of [E, above * N, K]: so many matrices above each other, each with a factor of its own."""
    parts, (sums, counts) = w.chunk(above, dim=-2), seen
    stacks: list[list[QuantizedTensor]] = [[] for _ in parts]
    step = max(1, _EXPERT_BYTES // (8 * sums.shape[-1] ** 2))
    for first in range(0, len(w), step):
        experts = slice(first, first + step)
        spread = calibrated.spread_of(sums[experts], counts[experts])
        for stack, part in zip(stacks, parts, strict=True):
            stack.append(_matrices(part[experts], spread, bits, policy))
    return fuse_rows([_joined(stack) for stack in stacks])


def _matrices(
    w: torch.Tensor, spread: torch.Tensor, bits: int, policy: QuantizationPolicy
) -> QuantizedTensor:
    codebook = get_codebook(policy.codebook_for(bits), bits).to(w.device)
    form, search = policy.absmax_format, policy.search

    def alone(block: torch.Tensor) -> Any:
        return torch.ops.kbit.quantize(block, codebook, bits, form, search)

    with without_autocast(w.device):
        parts = calibrated.quantize(w, spread, codebook, form, search, alone)
    return QuantizedTensor(*parts[:2], codebook, parts[2], bits, tuple(w.shape))


def _joined(stacks: list[QuantizedTensor]) -> QuantizedTensor:
    """Stacks of experts, behind each other."""
    packed, absmax, scale = (
        torch.cat([getattr(stack, part) for stack in stacks]) for part in ("packed", "absmax", "scale")
    )
    first = stacks[0]
    shape = (len(packed), *first.shape[1:])
    return QuantizedTensor(packed, absmax, first.codebook, scale, first.bits, shape)
