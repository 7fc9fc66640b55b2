"""`generate` goes on where an earlier call ended: what was computed of a prompt's beginning is kept.

    kbit.enable_prefix_caching(model)
    model.generate(ids)                   # a turn of a chat
    model.generate(longer_ids)            # the next turn, which begins with that one and its answer

Every turn of a chat, and every call of an agent, is a prompt that begins with the one before. Keys and values
of that beginning depend on nothing behind it. So the caches of the last calls are kept: see `kept_caches`.
"""

from __future__ import annotations

import contextlib
import threading
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, TypeGuard

import torch

from kbit.integrations.transformers.kept_caches import Conversations, Kept, can_be_cut, cut, length_of
from kbit.integrations.transformers.preconditions import asked_once, changes, preconditions
from kbit.integrations.transformers.recordings import circumstances
from kbit.integrations.transformers.static_caches import roomy_length

_MODES = {"greedy_search", "sample"}
_IMPLEMENTATIONS = {None, "dynamic", "static"}
# Settings by which `generate` computes other tokens than the prompt's, or gives its cache away.
_OTHER_WAYS = ("prefill_chunk_size", "return_dict_in_generate", "token_healing", "is_assistant")
_CACHES = {"DynamicCache", "StaticCache"}
_OF_NO_PROMPT = {"logits_to_keep", "use_cache"}  # what `generate` has for a model beside that


def enable_prefix_caching(model: Any, conversations: int = 2) -> None:
    """Have `model.generate` compute only what earlier calls have not computed of a prompt's beginning.

    It does so for single prompts that are drawn or greedily decoded, with caches that grow (transformers' own
    choice) or of a fixed size (`cache_implementation="static"`, see `enable_cuda_graphs`). Logits are sums in
    another order than of the whole prompt, so their last bits differ, and a choice between two nearly equal
    tokens may. Everything kept is forgotten when the model's weights, modules, hooks or adapters change.
    Prompts with images, calls that return their cache (`return_dict_in_generate`) and several prompts at once
    run as without.

    Args:
        model: a causal language model of transformers, or one of peft around it.
        conversations: how many caches are kept, each as large as the prompt and answer that it is of; those
            used last.

    Raises:
        TypeError: the model has no `generate` of transformers.
        ValueError: `conversations` is less than 1.

    >>> kbit.enable_prefix_caching(model)
    """
    model = _generating(model)
    if not hasattr(model, "_prepare_cache_for_generation"):
        raise TypeError(
            f"enable_prefix_caching needs a model with transformers' generate(), got {type(model).__name__}."
        )
    if conversations < 1:
        raise ValueError(
            f"conversations must be at least 1, got {conversations}; for none, disable_prefix_caching(model)."
        )
    for what in (_Generate(conversations), _PrepareCache()):
        setattr(model, what.name, types.MethodType(what, model))


def disable_prefix_caching(model: Any) -> None:
    """Undo `enable_prefix_caching`, and free what it kept.

    Args:
        model: any module; nothing happens where it was not enabled.
    """
    model = _generating(model)
    for name in (_Generate.name, _PrepareCache.name):
        method = getattr(vars(model).pop(name, None), "__func__", None)
        if isinstance(method, _Generate):
            method.forget(model)  # copies of the model may share what has it


def _generating(model: Any) -> Any:
    """The model whose `generate` runs: the one inside, for models of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class _Call(threading.local):
    """This thread's call of `generate`.

    Attributes:
        model: whose.
        conversations: its.
        prompt: int64 [tokens], on the CPU.
        cache: of the call, if it may be kept.
    """

    model: Any = None
    conversations: Any = None
    prompt: Any = None
    cache: Any = None


_call = _Call()


@contextlib.contextmanager
def _calling(model: Any, conversations: Conversations, prompt: torch.Tensor) -> Iterator[None]:
    before = dict(vars(_call))
    vars(_call).update(model=model, conversations=conversations, prompt=prompt, cache=None)
    try:
        yield
    finally:
        vars(_call).clear()
        vars(_call).update(before)


class _Generate:
    """`generate` of a model, and of copies that are made of it."""

    name = "generate"

    def __init__(self, conversations: int) -> None:
        self.__name__ = self.name  # by which a pickled model finds its class's method again
        self._most = conversations
        self._of_models: weakref.WeakKeyDictionary[Any, Conversations] = weakref.WeakKeyDictionary()

    def of(self, model: Any) -> Conversations:
        """A model's."""
        if model not in self._of_models:
            self._of_models[model] = Conversations(self._most)
        return self._of_models[model]

    def forget(self, model: Any) -> None:
        """Drop what is kept of a model."""
        self._of_models.pop(model, None)

    def __call__(self, model: Any, *given: Any, **named: Any) -> Any:
        """As the model's class has it."""
        ids = named.get("input_ids", named.get("inputs", given[0] if given else None))
        if not _is_one_prompt(ids) or named.get("custom_generate") is not None:
            return type(model).generate(model, *given, **named)
        with _calling(model, self.of(model), ids[0].to("cpu", torch.int64)):
            try:
                with asked_once():
                    sequences = type(model).generate(model, *given, **named)
            except BaseException as error:
                if isinstance(error, torch.OutOfMemoryError):
                    _call.conversations.forget()  # the next call may have the memory
                    raise
                with contextlib.suppress(Exception):  # the GPU's, say; the first error is to be raised
                    _keep(_call.prompt, interrupted=True)
                raise
            if isinstance(sequences, torch.Tensor):
                _keep(sequences[0].to("cpu", torch.int64))
            return sequences


def _is_one_prompt(ids: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 and not ids.is_floating_point()


def _keep(tokens: torch.Tensor, interrupted: bool = False) -> None:
    """Keep the cache of this thread's call, of tokens that it has computed.

    An interrupted step may have changed states, and keys and values behind what a cache says that it holds.
    """
    cache = _call.cache
    length = None if cache is None else length_of(cache)
    if not length or ((interrupted or length > len(tokens)) and not can_be_cut(cache)):
        return
    cut(cache, min(length, len(tokens)))
    _call.conversations.keep(Kept(cache, tokens[:length], _rests_on(_call.model)))


class _PrepareCache:
    """Gives `generate` its cache."""

    name = "_prepare_cache_for_generation"

    def __init__(self) -> None:
        self.__name__ = self.name

    def __call__(
        self,
        model: Any,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Puts a cache into `model_kwargs`: one that is kept, or what the model's class puts there."""
        may = _call.model is model and batch_size == 1
        may = may and _may_keep(generation_config, generation_mode, model_kwargs)
        if may:
            room = None
            if generation_config.cache_implementation == "static":
                asked = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
                room = max_cache_length = roomy_length(asked)
            _call.cache = _call.conversations.take(_call.prompt, room, lambda: _rests_on(model))
            if _call.cache is not None:
                model_kwargs["past_key_values"] = _call.cache
                return
            if model.device.type == "cuda":
                _call.conversations.make_room(max_cache_length, _free_memory(model.device))
        given = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        type(model)._prepare_cache_for_generation(model, *given)
        if may and type(cache := model_kwargs.get("past_key_values")).__name__ in _CACHES:
            _call.cache = cache


def _free_memory(device: torch.device) -> int:
    """Bytes of a GPU that a cache may take, with some left for what a prompt takes."""
    cuda = torch.cuda
    unused = cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return int(0.8 * (cuda.mem_get_info(device)[0] + unused))


def _may_keep(generation_config: Any, mode: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call is of one prompt that is its tokens alone, and nobody else gets its cache."""
    if mode.value not in _MODES or (generation_config.num_return_sequences or 1) != 1:
        return False
    if generation_config.cache_implementation not in _IMPLEMENTATIONS:
        return False
    if any(getattr(generation_config, name, None) for name in _OTHER_WAYS):
        return False
    if (generation_config.guidance_scale or 1) != 1:  # which computes another prompt beside it
        return False
    if model_kwargs.get("use_cache") is False:
        return False
    return all(_says_nothing(name, value) for name, value in model_kwargs.items())


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an argument of the model is as if it were not there."""
    if name in _OF_NO_PROMPT or value is None or (isinstance(value, dict) and not value):
        return True
    if not isinstance(value, torch.Tensor) or value.is_floating_point():
        return False
    if name == "position_ids":
        return bool((value == torch.arange(value.shape[-1], device=value.device)).all())
    # 0 are types of tokens that are text.
    return bool((value == (name == "attention_mask")).all())


def _rests_on(model: Any) -> Hashable:
    """What keys and values depend on beside tokens."""
    return preconditions(model), changes(model), model.training, circumstances(model.device)
