"""Calls of a model with a cache: run a few times, then recorded, then replayed into the same tensors.

What a recorded call rests on:
* Inputs are copied into tensors of its own, so positions and masks are the call's; the cache counts its
  tokens in a tensor, which the graph advances, and linear attention updates its states in place.
* What counts or replaces tensors in Python, such as a sliding window, no replay would advance. A cache that a
  recording leaves changed is put back, and its calls run as without graphs. Where every call finds the cache
  as the first did, empty, a replay leaves it as the recording did.
* The runs in front of the recording are calls like others: they allocate, choose kernels, compile.
* A graph writes to the cache that it was recorded with, and goes with it.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kbit.backends.cuda.capture import capture
from kbit.format.autocast import autocast_dtype
from kbit.format.words import first_line
from kbit.integrations.transformers.cache_argument import with_cache, without_cache
from kbit.integrations.transformers.static_caches import copied, is_same, put_back, states_of, tensors_of

# Called with what runs a call, and its device: returns what runs it again into the same outputs, and these.
Record = Callable[[Callable[[], dict[str, Any]], torch.device], tuple[Callable[[], None], dict[str, Any]]]


def record_cuda_graph(
    run: Callable[[], dict[str, Any]], device: torch.device, pool: Any = None
) -> tuple[Callable[[], None], dict[str, Any]]:
    """A CUDA graph of a call on a device, its memory from a pool. It must have run before, without one."""
    graph = torch.cuda.CUDAGraph()
    with capture(graph, device, pool):
        outputs = run()
    return graph.replay, outputs


class SharedPool:
    """`record_cuda_graph` into one pool of memory. Its graphs run one after the other, on any streams.

    Attributes:
        lock: held from a replay until what it wrote is copied, by whatever has graphs in the pool.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._pool: Any = None
        self._last: torch.cuda.Stream | None = None  # that a graph ran on

    def __call__(self, run: Any, device: torch.device) -> tuple[Callable[[], None], dict[str, Any]]:
        """As it."""
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            replay, outputs = record_cuda_graph(run, device, pool)
        except BaseException:
            if self._pool is pool:  # which takes no other capture
                self._pool = None
            raise

        def replay_in_turn() -> None:
            stream = torch.cuda.current_stream(device)
            if self._last not in (None, stream):
                stream.wait_stream(self._last)
            self._last = stream
            replay()

        return replay_in_turn, outputs


@dataclass
class _Recording:
    """Calls of equal shapes with one cache."""

    runs: int = 0
    failed: bool = False
    inputs: list[torch.Tensor] = field(default_factory=list)  # what a replay reads
    outputs: dict[str, Any] = field(default_factory=dict)  # what it writes
    replay: Callable[[], None] | None = None
    layers: list[Any] = field(default_factory=list)  # of the cache: their attributes
    tensors: list[tuple[Any, Any, torch.Tensor]] = field(default_factory=list)  # container, key, tensor
    found: list[Any] = field(default_factory=list)  # what the cache's layers held before
    left: list[Any] = field(default_factory=list)  # and behind, if something else

    def is_stale(self, cache: Any) -> bool:
        """Whether the cache has tensors in other places than those recorded, or holds other things."""
        if self.replay is None:
            return False
        states = states_of(cache)
        if len(states) != len(self.layers) or not all(map(operator.is_, states, self.layers)):
            return True
        return not _are_there(self.tensors) or (bool(self.left) and not all(map(is_same, states, self.found)))


class Following:
    """Runs the steps behind a replayed one, whose inputs it makes of the last one's, on the device.

    Args:
        one: the recording; not kept alive, for it keeps its cache's tensors.
        inputs: of the step that was replayed.
        lock: see `Recordings`.
        output_type: of outputs.
    """

    def __init__(
        self, one: _Recording, inputs: dict[str, Any], lock: threading.Lock, output_type: Any
    ) -> None:
        self._one, self._lock, self._output_type = weakref.ref(one), lock, output_type
        self._next: Any = None
        names = [name for name, value in inputs.items() if _is_tensor(value)]
        self._inputs = dict(zip(names, one.inputs, strict=True))

    def holds(self, cache: Any) -> bool:
        """Whether the recording may be replayed; if so it stays for the next call."""
        one = self._one()
        self._next = None if one is None or one.is_stale(cache) else one
        return self._next is not None

    def lengthen(self, name: str, tokens: int) -> None:
        """Have the mask of tokens of that name, if there is one, have ones behind so many tokens."""
        if name in self._inputs:
            with self._lock:
                self._inputs[name][:, tokens:].fill_(1)

    def __call__(self, ids: torch.Tensor, cache: Any) -> Any:
        """The output for the token behind the last one, [batch, 1]."""
        one, self._next = self._next, None
        with self._lock:
            self._inputs["input_ids"].copy_(ids)
            if "position_ids" in self._inputs:
                self._inputs["position_ids"].add_(1)
            one.replay()
            outputs = {name: value.clone() for name, value in one.outputs.items()}
        return self._output_type(**with_cache(cache, outputs))


class Recordings:
    """Recordings of calls of a model, by cache and by what inputs look like.

    Args:
        run: what is recorded: (cache, inputs) -> an output of transformers.
        record: such as `record_cuda_graph`.
        refused: told why a call could not be recorded.
        runs_before: a recording.
        may_leave: whether calls may change what a cache holds in Python; each then has to find it as the
            first did.
    """

    def __init__(
        self,
        run: Callable[[Any, dict[str, Any]], Any],
        record: Record,
        refused: Callable[[str], None],
        runs_before: int,
        may_leave: bool = False,
    ) -> None:
        self._run, self._record, self._refused = run, record, refused
        self._runs_before, self._may_leave = runs_before, may_leave
        self._lock = getattr(record, "lock", None) or threading.Lock()
        self._known: weakref.WeakKeyDictionary[Any, dict[Hashable, _Recording]] = weakref.WeakKeyDictionary()

    def __contains__(self, cache: Any) -> bool:
        return cache in self._known

    def __len__(self) -> int:
        """Caches with recordings."""
        return len(self._known)

    def clear(self) -> None:
        """Forget all."""
        self._known.clear()

    def __call__(self, cache: Any, inputs: dict[str, Any], device: torch.device) -> Any:
        """What `run(cache, inputs)` returns, from a recording if there is one, or it is time for one.

        Args:
            cache: of a fixed size.
            inputs: tensors, numbers and strings, in tuples, lists and dicts; with others nothing is recorded.
            device: of the model.
        """
        leaves, structure = tree_flatten(inputs)
        if (reason := _why_not_copied(leaves)) is not None:
            self._refused(reason)
            return self._run(cache, inputs)
        key, known = _key(inputs, leaves, device), self._known.setdefault(cache, {})
        one = known.setdefault(key, _Recording())
        if one.is_stale(cache):
            one = known[key] = _Recording()
        if one.replay is None:
            if one.failed or one.runs < self._runs_before:
                one.runs += 1
                return self._run(cache, inputs)
            kept = [leaf.clone() if _is_tensor(leaf) else leaf for leaf in leaves]
            one.inputs = [leaf for leaf in kept if _is_tensor(leaf)]
            self._try_to_record(one, cache, tree_unflatten(kept, structure), device)
            return self(cache, inputs, device)
        with self._lock:  # graphs may share memory, and outputs lie there
            for mine, given in zip(one.inputs, filter(_is_tensor, leaves), strict=True):
                mine.copy_(given)
            one.replay()
            outputs = tree_map(lambda leaf: leaf.clone() if _is_tensor(leaf) else leaf, one.outputs)
        for state, left in zip(states_of(cache), one.left, strict=False):
            put_back(state, left)
        return self._output_type(**with_cache(cache, outputs))

    def following(self, cache: Any, inputs: dict[str, Any], device: torch.device) -> Following | None:
        """What runs the steps behind one with such arguments, if that is recorded and gives logits alone.

        Args:
            cache, inputs, device: see `__call__`; the inputs are in no tuples, lists or dicts.
        """
        one = self._known.get(cache, {}).get(_key(inputs, list(inputs.values()), device))
        if one is None or one.replay is None or one.left or one.outputs.keys() != {"logits"}:
            return None
        return Following(one, inputs, self._lock, self._output_type)

    def _try_to_record(
        self, one: _Recording, cache: Any, inputs: dict[str, Any], device: torch.device
    ) -> None:
        its_cache = weakref.ref(cache)  # a recording goes with its cache, which it so must not keep

        def run() -> dict[str, Any]:
            outputs = self._run(its_cache(), inputs)
            self._output_type = type(outputs)
            return without_cache(outputs)

        layers = states_of(cache)
        found = [copied(layer) for layer in layers]
        places = list(tensors_of(cache))
        try:
            with _without_kept_casts():
                one.replay, one.outputs = self._record(run, device)
            unchanged = all(map(is_same, layers, found))
            may = unchanged or (self._may_leave and _are_there(places))
            reason = None if may else "its cache counts or allocates in Python"
        except RuntimeError as error:
            unchanged, reason = False, first_line(error)
        if not unchanged:
            one.found, one.left = found, [] if reason else [copied(layer) for layer in layers]
            for layer, before in zip(layers, found, strict=True):
                put_back(layer, before)
        if reason is None:
            one.layers, one.tensors = layers, places
            return
        one.replay, one.failed = None, True
        self._refused(reason)


def _key(inputs: dict[str, Any], leaves: list[Any], device: torch.device) -> tuple[Hashable, ...]:
    """What a recording is found by."""
    sizes = ((leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves)
    return (*circumstances(device), *inputs, *sizes)


def circumstances(device: torch.device) -> tuple[Hashable, ...]:
    """What a call depends on beside its inputs: inference mode, and the dtype of autocast."""
    return torch.is_inference_mode_enabled(), autocast_dtype(device)


@contextlib.contextmanager
def _without_kept_casts() -> Iterator[None]:
    """Weights that autocast casts are cast in the recording: it frees those that it keeps."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _are_there(places: list[tuple[Any, Any, torch.Tensor]]) -> bool:
    return all(_at(container, key) is tensor for container, key, tensor in places)


def _at(container: Any, key: Any) -> Any:
    if isinstance(container, list):
        return container[key] if key < len(container) else None
    return container.get(key)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _why_not_copied(leaves: list[Any]) -> str | None:
    others = (leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, int, float, str, type(None))))
    return next((f"an input is a {type(leaf).__name__}, not a tensor" for leaf in others), None)
