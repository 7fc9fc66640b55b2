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
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, TypeGuard

import torch

from kbit.integrations.devices import is_distributed
from kbit.integrations.transformers.cache_argument import cache_in, cache_name
from kbit.integrations.transformers.kept_caches import (
    Conversations,
    Kept,
    are_alike,
    can_be_cut,
    copy_tokens,
    cut,
    length_of,
)
from kbit.integrations.transformers.kept_calls import goes_on, may_keep
from kbit.integrations.transformers.own_methods import generating, put, take_away
from kbit.integrations.transformers.preconditions import changes, hand_on, preconditions, stranger_in
from kbit.integrations.transformers.recordings import circumstances
from kbit.integrations.transformers.static_caches import roomy_length

_CACHES = {"DynamicCache", "StaticCache"}  # classes of transformers


def enable_prefix_caching(model: Any, conversations: int = 2) -> None:
    """Have `model.generate` compute only what earlier calls have not computed of a prompt's beginning.

    It does so for single prompts that are drawn or greedily decoded, with caches that grow (transformers' own
    choice) or of a fixed size (`cache_implementation="static"`, see `enable_cuda_graphs`). Logits are sums in
    another order than of the whole prompt, so their last bits differ, and a choice between two nearly equal
    tokens may. What is kept is not used again once the model's weights, modules, hooks or adapters change;
    after changes that PyTorch does not count (`weight.data.copy_()`) enable it again. Prompts with images,
    calls that return their cache (`return_dict_in_generate`), several prompts at once, and models with hooks
    of yours, with rotary embeddings that depend on the text's length, with masks of their own or with states
    other than Qwen3-Next's and Qwen3.5's run as without. Tokens that a stopping criterion changes in place
    behind the model's back are not noticed.

    Args:
        model: a causal language model of transformers, or one of peft or of torch.compile around it.
        conversations: how many caches are kept, each as large as the prompt and answer that it is of; those
            used last.

    Raises:
        TypeError: the model has no `generate` of transformers, or `conversations` is no whole number.
        ValueError: `conversations` is less than 1.

    >>> kbit.enable_prefix_caching(model)
    """
    model = generating(model)
    if not hasattr(model, "_prepare_cache_for_generation"):
        raise TypeError(
            f"enable_prefix_caching needs a model with transformers' generate(), got {type(model).__name__}."
        )
    if not isinstance(conversations, int):
        raise TypeError(f"conversations must be a whole number, got {conversations!r}.")
    if conversations < 1:
        raise ValueError(
            f"conversations must be at least 1, got {conversations}; for none, disable_prefix_caching(model)."
        )
    put(model, "enable_prefix_caching", _Generate(conversations), _PrepareCache())


def disable_prefix_caching(model: Any) -> None:
    """Undo `enable_prefix_caching`, and free what it kept.

    Args:
        model: any module; nothing happens where it was not enabled.
    """
    take_away(generating(model), _Generate.name, _PrepareCache.name)


class _Call(threading.local):
    """This thread's call of `generate`.

    Attributes:
        model: whose.
        conversations: its.
        prompt: int64 [tokens], on the CPU; None where it is not one.
        cache: of the call, if it may be kept.
        rests_on: what that depends on beside tokens.
    """

    model: Any = None
    conversations: Any = None
    prompt: Any = None
    cache: Any = None
    rests_on: tuple[Hashable, ...] = ()


_call = _Call()


@contextlib.contextmanager
def _calling(model: Any, conversations: Conversations, prompt: torch.Tensor | None) -> Iterator[None]:
    before = dict(vars(_call))
    hand_on(None, None)
    vars(_call).update(model=model, conversations=conversations, prompt=prompt, cache=None, rests_on=())
    try:
        yield
    finally:
        hand_on(None, None)
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
        conversations, prompt = self.of(model), None
        if _is_one_prompt(ids) and named.get("custom_generate") is None:
            prompt = ids[0].to("cpu", torch.int64, copy=True)  # which the caller may write to
        with _calling(model, conversations, prompt):
            try:
                sequences = type(model).generate(model, *given, **named)
            except torch.OutOfMemoryError:
                conversations.forget()  # the next call may have the memory
                raise
            except BaseException:
                with contextlib.suppress(Exception):  # the GPU's, say; the first error is to be raised
                    _keep(_call.prompt, interrupted=True)
                raise
            if isinstance(sequences, torch.Tensor) and _call.cache is not None:
                _keep(sequences[0].to("cpu", torch.int64, copy=True))
            return sequences


def _is_one_prompt(ids: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(ids, torch.Tensor) and ids.dim() == 2 and len(ids) == 1 and not ids.is_floating_point()


def _keep(tokens: torch.Tensor, interrupted: bool = False) -> None:
    """Keep the cache of this thread's call, of tokens that it has computed.

    An interrupted step may have changed states, and keys and values behind what a cache says that it holds.
    """
    cache = _call.cache
    length = None if cache is None else length_of(cache)
    if not length or (interrupted and (length < len(tokens) or not can_be_cut(cache))):
        return
    if (stranger := stranger_in(_call.model)) is not None:  # what it does to keys nobody else knows
        whole = "Its prompts are computed whole: prefix caching would show it their rests alone."
        _call.conversations.tell(f"{stranger} {whole}")
        return
    if interrupted:
        cut(cache, length, len(tokens))
    elif length > len(tokens):  # it holds something else, such as a soft prompt
        return
    if _rests_on(_call.model) == _call.rests_on:  # a streamer, say, may have changed the model
        _call.conversations.keep(Kept(cache, tokens[:length], _call.rests_on))


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
        may = _call.model is model and _call.prompt is not None and batch_size == 1
        may = may and may_keep(model, generation_config, generation_mode, model_kwargs)
        found = None
        if may:
            room = None
            if generation_config.cache_implementation == "static":
                asked = max(max_cache_length, getattr(generation_config, "max_cache_len", None) or 0)
                room, max_cache_length = asked, roomy_length(asked)
            _call.rests_on = _rests_on(model)
            if room is not None:  # recorded steps ask the same next
                hand_on(model, _call.rests_on[0])
            found = _call.conversations.find(_call.prompt, room, _call.rests_on)
            if found is not None and found.cache is not None:
                model_kwargs[cache_name()] = _call.cache = found.cache
                return
            if model.device.type == "cuda" and not is_distributed():
                _call.conversations.make_room(max_cache_length, _free_memory(model.device))
        given = generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        type(model)._prepare_cache_for_generation(model, *given)
        cache = cache_in(model_kwargs)
        if not may or type(cache).__name__ not in _CACHES or not goes_on(model, cache):
            return
        _call.cache = cache
        if found is not None and are_alike(found.source.cache, cache):
            copy_tokens(found.source.cache, cache, found.shared)
            if found.stays:
                _call.conversations.keep(found.source)


def _free_memory(device: torch.device) -> int:
    """Bytes of a GPU that a cache may take, with some left for what a prompt takes."""
    cuda = torch.cuda
    unused = cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return int(0.8 * (cuda.mem_get_info(device)[0] + unused))


def _rests_on(model: Any) -> tuple[Hashable, ...]:
    """What keys and values depend on beside tokens."""
    return preconditions(model), changes(model), model.training, circumstances(model.device)
