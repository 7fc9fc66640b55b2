"""`generate`, its decoding steps replayed from CUDA graphs.

    kbit.enable_cuda_graphs(model)
    model.generate(ids, cache_implementation="static", max_new_tokens=64)

A step launches a thousand kernels, most of which take less time than launching them; a graph launches them
all at once. transformers asks a model for what runs its steps where the cache's tensors stay in their places
(`get_compiled_call`), by default torch.compile of the whole model. Here it is `Steps`.

What a recorded step of transformers' static cache rests on:
* Inputs are copied into tensors of its own, so positions and masks are the step's; the cache counts its
  tokens in a tensor, which the graph advances, and linear attention updates its states in place.
* What counts or replaces tensors in Python, such as a sliding window, no replay would advance. A cache that a
  recording leaves changed is put back, and its steps run as without graphs.
* The steps in front of the recording are steps of the answer, too: they allocate, choose kernels, compile.
* A graph writes to the cache that it was recorded with. `generate` makes a new one at every call; it is given
  the last one again where that has the right size and nobody else has kept it.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kbit.integrations.transformers.attention import with_additive_masks
from kbit.integrations.transformers.compiled_layers import compiled_layers, decoder_layers
from kbit.integrations.transformers.late_masks import MASKS, late_masks, with_late_mask, with_masks
from kbit.integrations.transformers.latent_attention import forget_decoded
from kbit.integrations.transformers.static_caches import (
    LONGEST,
    LastCaches,
    copied,
    is_same,
    states_of,
    tensors_of,
    why_not_recorded,
)
from kbit.integrations.transformers.step_kernels import step_kernels

WARM_STEPS = 2
# Called with what runs a step, and its device: returns what runs it again into the same outputs, and these.
Record = Callable[[Callable[[], dict[str, Any]], torch.device], tuple[Callable[[], None], dict[str, Any]]]


class CUDAGraphWarning(UserWarning):
    """A model's decoding steps cannot be recorded; they run as they would without CUDA graphs."""


def enable_cuda_graphs(model: Any, *, compile_layers: bool = False) -> None:
    """Have `model.generate` replay its decoding steps from CUDA graphs; for 16-bit models, too.

    It does so on a GPU with a cache of fixed size, `generate(cache_implementation="static")`, instead of
    transformers' torch.compile of the whole model. The first steps with a cache run kernel by kernel, then
    one is recorded, with kernels of its own around the layers (`step_kernels`). The last call's cache stays,
    unless you hold it, and with it the graph, until a call has another batch size or needs more tokens, or
    the model's weights lie elsewhere, or other hooks or adapters of peft are in it. After other changes
    enable it again, which forgets all graphs.

    Args:
        model: a causal language model of transformers, or one of peft around it.
        compile_layers: torch.compile each decoder layer for these steps, too, which makes few kernels of many
            and takes a minute or so, once for each batch size. See `overlap_kernels`.

    Raises:
        TypeError: the model has no `generate` of transformers, or, to be compiled, no decoder with layers.

    >>> kbit.enable_cuda_graphs(model)
    """
    model = _generating(model)
    if not hasattr(model, "get_compiled_call"):
        raise TypeError(
            f"enable_cuda_graphs needs a model with transformers' generate(), got {type(model).__name__}. "
            "For a loop of your own there is torch.cuda.CUDAGraph."
        )
    if compile_layers:
        decoder_layers(model)
    model.get_compiled_call = types.MethodType(_StepsOfModels(compile_layers), model)
    model._prepare_static_cache = types.MethodType(LastCaches(), model)
    vars(model).update(late_masks(model))


def disable_cuda_graphs(model: Any) -> None:
    """Undo `enable_cuda_graphs`, and free its graphs, its cache, and what its steps decoded.

    Args:
        model: any; nothing happens where it was not enabled.
    """
    model = _generating(model)
    for name in (_StepsOfModels.name, LastCaches.name, MASKS, LONGEST):
        vars(model).pop(name, None)
    forget_decoded(model)


def _generating(model: Any) -> Any:
    """The model whose `generate` runs: the one inside, for models of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _StepsOfModels:
    """What runs the steps of a model, and of copies that are made of it."""

    name = "get_compiled_call"

    def __init__(self, compile_layers: bool) -> None:
        self.compile_layers = compile_layers
        self.__name__ = self.name  # by which a pickled model finds its class's method again
        self._steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()

    def __call__(self, model: Any, compile_config: Any = None) -> Steps:
        if model not in self._steps:
            self._steps[model] = Steps(model, self.compile_layers)
        self._steps[model].prepare()
        return self._steps[model]


def record_cuda_graph(
    run: Callable[[], dict[str, Any]], device: torch.device
) -> tuple[Callable[[], None], dict[str, Any]]:
    """A CUDA graph of a call on a device. It must have run before, kernel by kernel."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    # Left out, the stream is of the device of the first capture. Other threads may stream text.
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = run()
    return graph.replay, outputs


@dataclass
class _Step:
    """Steps of equal shapes with one cache."""

    runs: int = 0
    failed: bool = False
    inputs: list[torch.Tensor] = field(default_factory=list)  # what a replay reads
    outputs: dict[str, Any] = field(default_factory=dict)  # what it writes
    replay: Callable[[], None] | None = None
    state: list[tuple[Any, Any, torch.Tensor]] = field(default_factory=list)  # container, key, tensor

    def is_stale(self) -> bool:
        """Whether the cache has tensors in other places than those that were recorded."""
        return not all(container[key] is tensor for container, key, tensor in self.state)


class Steps:
    """Decoding steps of a model: run a few times, then recorded, then replayed.

    Args:
        model: see `enable_cuda_graphs`; not kept alive.
        compile_layers: see there.
        record: see `record_cuda_graph`.
    """

    def __init__(self, model: Any, compile_layers: bool = False, record: Record = record_cuda_graph) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._compile_layers, self._record = compile_layers, record
        self._steps: weakref.WeakKeyDictionary[Any, dict[Hashable, _Step]] = weakref.WeakKeyDictionary()
        self._compiled: dict[torch.nn.Module, Any] = {}
        self._rests_on: Hashable = None
        self._reasons: set[str] = set()  # that were told

    def prepare(self) -> None:
        """Before a call of `generate`: forget recordings that do not hold any more."""
        rests_on = _what_recordings_rest_on(self._model())
        if rests_on != self._rests_on:
            self._rests_on = rests_on
            self._steps.clear()

    def __call__(self, **inputs: Any) -> Any:
        """A step of the model: what `model(**inputs)` returns."""
        cache = inputs.pop("past_key_values", None)
        if not _is_of_one_token(inputs):  # a part of a prompt
            return self._run(cache, inputs)
        inputs = with_late_mask(self._model(), cache, inputs)
        leaves, structure = tree_flatten(inputs)
        reason = _why_not_copied(leaves)
        if reason is None and (cache is None or cache not in self._steps):
            reason = why_not_recorded(cache) or _why_not_here(self._model())
        if reason is not None:
            self._warn(reason)
            return self._run(cache, inputs)
        sizes = ((leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves)
        key = (torch.is_inference_mode_enabled(), *inputs, *sizes)
        steps = self._steps.setdefault(cache, {})
        step = steps.setdefault(key, _Step())
        if step.is_stale():
            step = steps[key] = _Step()
        if step.replay is None:
            if step.failed or step.runs < WARM_STEPS:
                step.runs += 1
                return self._run(cache, inputs)
            kept = [leaf.clone() if _is_tensor(leaf) else leaf for leaf in leaves]
            step.inputs = [leaf for leaf in kept if _is_tensor(leaf)]
            self._try_to_record(step, cache, tree_unflatten(kept, structure))
            return self(past_key_values=cache, **inputs)
        for mine, given in zip(step.inputs, filter(_is_tensor, leaves), strict=True):
            mine.copy_(given)
        step.replay()
        outputs = tree_map(lambda leaf: leaf.clone() if _is_tensor(leaf) else leaf, step.outputs)
        return self._output_type(**outputs, past_key_values=cache)

    def _run(self, cache: Any, inputs: dict[str, Any]) -> Any:
        model = self._model()
        compiled = (
            compiled_layers(model, self._compiled) if self._compile_layers else contextlib.nullcontext()
        )
        with step_kernels(model), compiled:
            inputs = with_additive_masks(model, with_masks(model, cache, inputs))
            return model(past_key_values=cache, **inputs)

    def _try_to_record(self, step: _Step, cache: Any, inputs: dict[str, Any]) -> None:
        its_cache = weakref.ref(cache)  # a recording goes with its cache, which it so must not keep

        def run() -> dict[str, Any]:
            outputs = self._run(its_cache(), inputs)
            self._output_type = type(outputs)
            return {name: value for name, value in outputs.items() if name != "past_key_values"}

        before = [(layer, copied(layer)) for layer in states_of(cache)]
        try:
            step.replay, step.outputs = self._record(run, self._model().device)
            unchanged = all(is_same(layer, copy) for layer, copy in before)
            reason = None if unchanged else "its cache counts or allocates in Python"
        except RuntimeError as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        if reason is None:
            step.state = list(tensors_of(cache))
            return
        for layer, copy in before:
            layer.clear()
            layer.update(copy)
        step.replay, step.failed = None, True
        self._warn(reason)

    def _warn(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.add(reason)
            warnings.warn(
                f"decoding steps of {type(self._model()).__name__} run without CUDA graphs: {reason}.",
                CUDAGraphWarning,
                stacklevel=3,
            )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _is_of_one_token(inputs: dict[str, Any]) -> bool:
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    return given is not None and given.shape[1] == 1


def _what_recordings_rest_on(model: Any) -> Hashable:
    """Where weights lie, how attention is computed, which hooks there are, and which adapters of peft."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    places = tuple(tensor.data_ptr() for tensor in local)
    hooks = tuple(
        hook for module in model.modules() for hook in (*module._forward_pre_hooks, *module._forward_hooks)
    )
    tuned = (module for module in model.modules() if hasattr(type(module), "merged_adapters"))
    adapters = tuple(
        (
            module.disable_adapters,
            tuple(module.active_adapters),
            tuple(module.merged_adapters),
            tuple(getattr(module, "scaling", {}).items()),
        )
        for module in tuned
    )
    return model.training, model.config._attn_implementation, places, hooks, adapters


def _why_not_here(model: Any) -> str | None:
    devices = set(getattr(model, "hf_device_map", {}).values())
    return f"it is on {len(devices)} devices" if len(devices) > 1 else None


def _why_not_copied(leaves: list[Any]) -> str | None:
    others = (leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, int, float, str, type(None))))
    return next((f"an input is a {type(leaf).__name__}, not a tensor" for leaf in others), None)
