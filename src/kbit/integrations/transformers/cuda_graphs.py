"""`generate`, its decoding steps replayed from CUDA graphs.

    kbit.enable_cuda_graphs(model)
    model.generate(ids, cache_implementation="static", max_new_tokens=64)

A step launches a thousand kernels, most of which take less time than launching them; a graph launches them
all at once. transformers asks a model for what runs its steps where the cache's tensors stay in their places
(`get_compiled_call`), by default torch.compile of the whole model. Here it is `Steps`.

What a recorded step of transformers' static cache rests on:
* Inputs are copied into tensors of its own, so positions and masks are the step's; the cache counts its
  tokens in a tensor, which the graph advances, and linear attention updates its states in place.
* A sliding window counts in Python, which a replay would not advance: such models run as without graphs.
* The steps in front of the recording are steps of the answer, too: they allocate, choose kernels, compile.
* A graph writes to the cache that it was recorded with. `generate` makes a new one at every call; it is given
  the last one again where that has the right size and nobody else has kept it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kbit.integrations.transformers.compiled_layers import compiled_layers, decoder_layers

WARM_STEPS = 2
_UNSHARED = 3  # references to a cache: the one that is kept, a variable, an argument
# Called with what runs a step: returns what runs it again into the same outputs, and these.
Record = Callable[[Callable[[], dict[str, Any]]], tuple[Callable[[], None], dict[str, Any]]]


class CUDAGraphWarning(UserWarning):
    """A model's decoding steps cannot be recorded; they run as they would without CUDA graphs."""


def enable_cuda_graphs(model: Any, *, compile_layers: bool = False) -> None:
    """Have `model.generate` replay its decoding steps from CUDA graphs; for 16-bit models, too.

    It does so on a GPU with a cache of fixed size, `generate(cache_implementation="static")`, instead of
    transformers' torch.compile of the whole model. The first steps with a cache run kernel by kernel, then
    one is recorded. The last call's cache stays, and with it the graph, until one has another batch size or
    needs more tokens, or the model's weights lie elsewhere, or other adapters of peft are active. After other
    changes, such as a hook, enable it again, which forgets all graphs.

    Args:
        model: a causal language model of transformers, or one of peft around it.
        compile_layers: torch.compile each decoder layer for these steps, too, which makes few kernels of many
            and takes minutes, once for each batch size. See `overlap_kernels`.

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
    model._prepare_static_cache = types.MethodType(_CachesOfModels(), model)


def disable_cuda_graphs(model: Any) -> None:
    """Undo `enable_cuda_graphs`, and free its graphs and cache.

    Args:
        model: any; nothing happens where it was not enabled.
    """
    for name in (_StepsOfModels.name, _CachesOfModels.name):
        vars(_generating(model)).pop(name, None)


def _generating(model: Any) -> Any:
    """The model whose `generate` runs: the one inside, for models of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def why_not_recorded(cache: Any) -> str | None:
    """Why steps with this cache of transformers cannot be recorded; None if they can."""
    if cache is None:
        return "it keeps no cache"
    if any(getattr(cache, "is_sliding", ())):
        return "its cache has a sliding window, which counts tokens in Python"
    return None


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


class _CachesOfModels:
    """Gives `generate(cache_implementation="static")` its cache."""

    name = "_prepare_static_cache"

    def __init__(self) -> None:
        self.__name__ = self.name
        self._last: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()

    def __call__(self, model: Any, *arguments: Any, **named: Any) -> Any:
        # Without tensors yet, and as long as the longest so far.
        fresh = type(model)._prepare_static_cache(model, *arguments, **named)
        kind = _layers(fresh), named.get("batch_size"), model.dtype, model.device, _inference_mode()
        last_kind, last = self._last.get(model, (None, None))
        if last is None or last_kind != kind or None in kind or sys.getrefcount(last) > _UNSHARED:
            self._last[model] = kind, fresh
            return fresh
        last.reset()
        return last


def _inference_mode() -> bool:
    """Whether tensors are made that only inference mode may change."""
    return torch.is_inference_mode_enabled()


def _layers(cache: Any) -> tuple[Any, ...] | None:
    """Kinds and lengths of a cache's layers; None for caches of other kinds."""
    layers = getattr(cache, "layers", None)
    return layers and tuple((type(layer), getattr(layer, "max_cache_len", None)) for layer in layers)


def record_cuda_graph(run: Callable[[], dict[str, Any]]) -> tuple[Callable[[], None], dict[str, Any]]:
    """A CUDA graph of a call. It must have run before, kernel by kernel."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may stream text
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
        self._warned = False

    def prepare(self) -> None:
        """Before a call of `generate`: forget recordings that do not hold any more."""
        rests_on = _what_recordings_rest_on(self._model())
        if rests_on != self._rests_on:
            self._rests_on = rests_on
            self._steps.clear()

    def __call__(self, **inputs: Any) -> Any:
        """A step of the model: what `model(**inputs)` returns."""
        cache = inputs.pop("past_key_values", None)
        leaves, structure = tree_flatten(inputs)
        reason = why_not_recorded(cache) or _why_not_here(self._model()) or _why_not_copied(leaves)
        if reason is not None:
            self._warn(reason)
            return self._run(cache, inputs)
        sizes = ((leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves)
        key = (_inference_mode(), *inputs, *sizes)
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
        with compiled_layers(model, self._compiled) if self._compile_layers else contextlib.nullcontext():
            return model(past_key_values=cache, **inputs)

    def _try_to_record(self, step: _Step, cache: Any, inputs: dict[str, Any]) -> None:
        its_cache = weakref.ref(cache)  # a recording goes with its cache, which it so must not keep

        def run() -> dict[str, Any]:
            outputs = self._run(its_cache(), inputs)
            self._output_type = type(outputs)
            return {name: value for name, value in outputs.items() if name != "past_key_values"}

        try:
            step.replay, step.outputs = self._record(run)
            step.state = list(_tensors_of(cache))
        except RuntimeError as error:
            step.failed = True
            self._warn(str(error).splitlines()[0])

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"decoding steps of {type(self._model()).__name__} run without CUDA graphs: {reason}.",
                CUDAGraphWarning,
                stacklevel=3,
            )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _tensors_of(cache: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """The tensors of a cache's layers, and where each is to be found."""
    containers: list[Any] = [vars(layer) for layer in getattr(cache, "layers", ())]
    while containers:
        container = containers.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if _is_tensor(value):
                yield container, key, value
            elif isinstance(value, (dict, list)):
                containers.append(value)


def _what_recordings_rest_on(model: Any) -> Hashable:
    """Where weights lie, how attention is computed, and which adapters of peft take part."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    places = tuple(tensor.data_ptr() for tensor in tensors)
    tuned = (module for module in model.modules() if hasattr(type(module), "merged_adapters"))
    adapters = tuple(
        (module.disable_adapters, tuple(module.active_adapters), tuple(module.merged_adapters))
        for module in tuned
    )
    return model.training, model.config._attn_implementation, places, adapters


def _why_not_here(model: Any) -> str | None:
    devices = set(getattr(model, "hf_device_map", {}).values())
    return f"it is on {len(devices)} devices" if len(devices) > 1 else None


def _why_not_copied(leaves: list[Any]) -> str | None:
    others = (leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, int, float, str, type(None))))
    return next((f"an input is a {type(leaf).__name__}, not a tensor" for leaf in others), None)
