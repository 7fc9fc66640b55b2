"""Steps of `generate` that follow each other: what differs from one to the next is made on the GPU.

Between two steps `generate` extends the mask and the positions, takes the last of each, and hands them to
the model: a dozen small operators, and more Python than a small model's step takes on the GPU. Behind a
recorded step the next one is known. Its positions are those of the last one and 1, which is added in place,
and its mask has ones behind, which causal attention does not look at before their time. So `generate` is told
to leave both as they are, and the recording gets the new token alone. If the loop goes another way, what was
left out is made up for first.

Only in transformers' own loop, where the model has transformers' own methods for both, and its inputs are
tokens, positions, a mask of tokens and a cache. Mask and positions that were left as they are say so
themselves, for another call of the model's `generate` may come between two steps.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kbit.integrations.transformers.cache_argument import CACHE_NAMES, cache_in, with_cache
from kbit.integrations.transformers.late_masks import LATE
from kbit.integrations.transformers.own_methods import is_ours
from kbit.integrations.transformers.recordings import Following, Recordings, circumstances
from kbit.integrations.transformers.static_caches import require_room

NEXT = "kbit_next_ids"  # an input of steps, in place of all others but the cache
NAMES = _PREPARE, _UPDATE = "prepare_inputs_for_generation", "_update_model_kwargs_for_generation"
_TENSORS = {"input_ids", "position_ids", LATE}
_OTHERS = {"use_cache", "return_dict", "logits_to_keep"}
# What a loop may hand to the model: tensors that grow, and what stays.
_GROWING = "attention_mask", "position_ids"
_LACK = "kbit_lacks"  # an attribute of these: how many steps they lack
_HANDED = {*_GROWING, *CACHE_NAMES, "use_cache", "logits_to_keep"}


class _Grown:
    """A loop's mask and positions, which `lack` as many steps.

    Args:
        mask, positions: as `generate` has them; or None.
    """

    def __init__(self, mask: Any, positions: Any) -> None:
        self.mask, self.positions, self.lack = mask, positions, 0

    def are(self, named: dict[str, Any]) -> bool:
        """Whether arguments of a loop hold them."""
        mask, positions = (named.get(name) for name in _GROWING)
        return mask is self.mask and positions is self.positions

    def leave(self) -> None:
        """Have them lack one step more."""
        self.lack += 1
        for one in (self.mask, self.positions):
            if one is not None:
                setattr(one, _LACK, self.lack)


def _made_up(model: Any, named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a loop, with what its mask and positions lack."""
    for _ in range(max(getattr(named.get(name), _LACK, 0) for name in _GROWING)):
        named = getattr(type(model), _UPDATE)(model, {}, dict(named))
    return named


def _tokens(ids: torch.Tensor, named: dict[str, Any]) -> int:
    """How many tokens a cache is to hold behind a loop's next step, or prompt.

    Args:
        ids: so far, without those that were given as embeddings.
        named: as the loop has it, with a mask and positions of all tokens, or without.
    """
    growing = (named.get(name) for name in _GROWING)
    return max(ids.shape[1], *(one.shape[-1] for one in growing if isinstance(one, torch.Tensor)), 0)


class Loop:
    """A loop of `generate` behind a recorded step.

    Args:
        cache: which it is of; not kept alive.
        outputs: what the step returned.
        following: runs those behind it.
        where: `circumstances` of the step.
    """

    def __init__(self, cache: Any, outputs: Any, following: Following, where: Any) -> None:
        self._cache: Any = weakref.ref(cache)
        self._outputs: Any = weakref.ref(outputs)
        self._following, self._where = following, where
        self._grown: _Grown | None = None
        self._length: int | None = None  # of its ids before the first step that got its token alone
        self._tokens, self._room = 0, 0  # in the cache behind that step, and for how many it has room

    def gave(self, outputs: Any) -> bool:
        """Whether a step's output is the last one."""
        return outputs is not None and self._outputs() is outputs

    def begins(self, named: dict[str, Any]) -> bool:
        """Take note of arguments behind the recorded step; False: they are not known, or others now."""
        if self._grown is not None or not named.keys() <= _HANDED:
            return False
        self._grown = _Grown(*(named.get(name) for name in _GROWING))
        return True

    def grown(self, named: dict[str, Any]) -> _Grown | None:
        """The loop's mask and positions, if its arguments hold them still."""
        if self._grown is None or not named.keys() <= _HANDED:
            return None
        is_its = self._grown.are(named) and cache_in(named) is self._cache()
        return self._grown if is_its else None

    def goes_on(self, ids: torch.Tensor, named: dict[str, Any]) -> bool:
        """Whether the next step is the one behind the last, with these ids so far.

        Raises:
            ValueError: if so, the cache has no room for it.
        """
        grown = self.grown(named)
        if grown is None:
            return False
        if self._length is None:
            self._length, self._tokens = ids.shape[1], _tokens(ids, named)
            if grown.mask is not None:
                self._following.lengthen(LATE, grown.mask.shape[1] - 1)
            self._room = require_room(self._cache(), self._tokens)
        here = ids.shape[1] == self._length + grown.lack and circumstances(ids.device) == self._where
        if here and self._tokens + grown.lack > self._room:
            self._room = require_room(self._cache(), self._tokens + grown.lack)
        return here and self._following.holds(self._cache())

    def step(self, ids: torch.Tensor) -> Any:
        """The next step's output."""
        outputs = self._following(ids, self._cache())
        self._outputs = weakref.ref(outputs)
        return outputs


class Loops(threading.local):
    """A model's loop of this thread, if it is in one.

    Attributes:
        loop: it.
    """

    loop: Loop | None = None

    def begin(self, recordings: Recordings, cache: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """A step has run, maybe from a recording: then others may follow.

        Args:
            recordings: that it may be from.
            cache, inputs, outputs: of the step.
        """
        self.loop = None
        tensors = {name for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        if "input_ids" not in tensors or not (tensors <= _TENSORS and inputs.keys() <= {*_TENSORS, *_OTHERS}):
            return
        device = inputs["input_ids"].device
        following = recordings.following(cache, inputs, device)
        if following is not None:
            self.loop = Loop(cache, outputs, following, circumstances(device))


def _is_transformers_own(frame: Any) -> bool:
    """Whether a frame is of transformers' loop: others may look at masks and positions, and change them.

    Peft's, between that loop and the model, hands on what it gets.
    """
    from transformers import GenerationMixin

    while frame is not None and frame.f_globals.get("__name__") == "peft.peft_model":
        frame = frame.f_back
    return frame is not None and frame.f_code is GenerationMixin._sample.__code__


class Prepare:
    """In place of a model's `prepare_inputs_for_generation`."""

    name = _PREPARE

    def __init__(self, kind: type, loops_of: Callable[[Any], Loops]) -> None:
        self.__name__ = self.name
        # By which `generate` checks its arguments.
        self.__signature__ = inspect.signature(getattr(kind, self.name))
        self._loops_of = loops_of

    def __call__(
        self, model: Any, input_ids: Any, next_sequence_length: int | None = None, **named: Any
    ) -> dict[str, Any]:
        """As the model's own; of a step that follows a recorded one, its token and its cache."""
        loops = self._loops_of(model)
        loop = loops.loop if next_sequence_length == 1 and _is_transformers_own(sys._getframe(1)) else None
        if loop is not None and loop.goes_on(input_ids, named):
            return with_cache(cache_in(named), {NEXT: input_ids[:, -1:]})
        require_room(cache_in(named), _tokens(input_ids, named))
        named = _made_up(model, named)
        own = getattr(type(model), self.name)
        return own(model, input_ids, next_sequence_length=next_sequence_length, **named)


class Update:
    """In place of a model's `_update_model_kwargs_for_generation`."""

    name = _UPDATE

    def __init__(self, loops_of: Callable[[Any], Loops]) -> None:
        self.__name__ = self.name
        self._loops_of = loops_of

    def __call__(
        self, model: Any, outputs: Any, model_kwargs: dict[str, Any], *given: Any, **named: Any
    ) -> dict[str, Any]:
        """As the model's own; behind a step that another may follow, what it was given."""
        loops = self._loops_of(model)
        loop = loops.loop if not given and named.get("num_new_tokens", 1) == 1 else None
        if loop is not None and not (loop.gave(outputs) and _is_transformers_own(sys._getframe(1))):
            loop = None
        if loop is not None and (grown := loop.grown(model_kwargs)) is not None:
            grown.leave()
            return model_kwargs
        own = getattr(type(model), self.name)
        model_kwargs = own(model, outputs, _made_up(model, model_kwargs), *given, **named)
        loops.loop = loop if loop is not None and loop.begins(model_kwargs) else None
        return model_kwargs


def methods(model: Any, loops_of: Callable[[Any], Loops]) -> list[Any]:
    """What stands in for a model's methods, if they are transformers' own.

    Args:
        model: of transformers.
        loops_of: model -> its `Loops`.
    """
    from transformers import GenerationMixin

    kind = type(model)
    if any(getattr(kind, name) is not getattr(GenerationMixin, name) for name in NAMES):
        return []
    if any(name in vars(model) and not is_ours(vars(model)[name]) for name in NAMES):
        return []
    return [Prepare(kind, loops_of), Update(loops_of)]
