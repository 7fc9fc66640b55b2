"""What attention layers need for a step of kernels of ours, and how their classes are tried."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from kbit.integrations.transformers.attention import STEPS, runs_by
from kbit.integrations.transformers.cache_argument import cache_in
from kbit.integrations.transformers.static_caches import appends
from kbit.nn.mixins import MixedIn
from kbit.nn.norm import FusedNorm
from kbit.nn.standing_in import standing_in
from kbit.nn.support import is_apart
from kbit.ops import grad_checks

Found = TypeVar("Found")
TRIED_BATCH, TRIED_ROOM, TRIED_LENGTH = 2, 5, 2


class Kinds:
    """The classes of models' layers that have certain parts.

    Args:
        modules: names that such a layer's children have.
        attributes: names that it has itself.
    """

    def __init__(self, modules: Iterable[str], attributes: Iterable[str]) -> None:
        self._modules, self._attributes = {*modules}, {*attributes}
        self._known: weakref.WeakKeyDictionary[Any, list[type[nn.Module]]] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def run(self, model: Any, make: Callable[[Any], Any]) -> Iterator[None]:
        """A model's layers of these classes run by what `make` makes of their class's forward."""
        with contextlib.ExitStack() as stack:
            for kind in self._of(model):
                stack.enter_context(standing_in(kind, "forward", make))
            yield

    def _of(self, model: Any) -> list[type[nn.Module]]:
        """Those whose forward a model's layers run."""
        if model not in self._known:
            self._known[model] = list(dict.fromkeys(self._find(model)))
        return self._known[model]

    def _find(self, model: Any) -> Iterator[type[nn.Module]]:
        for module in model.modules():
            if module._modules.keys() >= self._modules and vars(module).keys() >= self._attributes:
                # Below those that it is mixed with.
                own: Any = (kind for kind in type(module).__mro__ if not issubclass(kind, MixedIn))
                kind = next((kind for kind in own if "forward" in vars(kind)), nn.Module)
                if kind is not nn.Module:
                    yield kind


class Tried(weakref.WeakKeyDictionary[Any, dict[Any, Found]]):
    """What was found of layers' classes, by layer and key; `tried` looks it up."""

    every: ClassVar[list[Tried[Any]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.every.append(self)


def forget_tried(model: torch.nn.Module) -> None:
    """Have a model's layers tried anew: what their classes compute may follow from what a config says."""
    for known in Tried.every:
        for module in model.modules():
            known.pop(module, None)


def tried(known: Tried[Found], layer: Any, key: Any, find: Callable[[], Found]) -> Found:
    """What was found of a layer, once for each key; its class's forward is one, since it may be replaced."""
    found = known.setdefault(layer, {})
    if key not in found:
        found[key] = find()
    return found[key]


def is_plain_call() -> bool:
    """Whether nobody compiles, transforms, casts or differentiates what is computed."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    return not grad_checks.in_transform()


def cached_layer(
    layer: Any, x: Any, named: dict[str, Any], others: Iterable[torch.Tensor | None] = ()
) -> Any:
    """The layer of a static cache that a step of ours can write to; None where there is none.

    Args:
        layer: of transformers.
        x: its input, [batch, tokens, hidden size].
        named: its further arguments; among them cos and sin are of x's dtype and device.
        others: further tensors that must be.
    """
    from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer

    if not is_plain_call():
        return None
    cache, position = cache_in(named), named.get("position_embeddings")
    if not isinstance(cache, Cache) or isinstance(cache, EncoderDecoderCache):
        return None
    if type(cache).update is not Cache.update or cache.offloading:
        return None
    if layer.training or not runs_by(layer.config, STEPS) or layer.layer_idx >= len(cache.layers):
        return None
    cached = cache.layers[layer.layer_idx]
    if type(cached) is not StaticLayer or "attention_mask" not in named:
        return None
    if not appends(cached, x, x) or x.dim() != 3:
        return None
    angles = position if isinstance(position, tuple) and len(position) == 2 else ()
    tensors = [tensor for tensor in (*angles, *others) if tensor is not None]
    if not angles or any(one.dtype != x.dtype or one.device != x.device for one in tensors):
        return None
    return cached


def is_plain_norm(norm: Any, columns: int) -> bool:
    """Whether a norm of so many columns computes what `kbit::rms_norm` does, and nothing else."""
    if not isinstance(norm, FusedNorm) or norm.weight.shape != (columns,):
        return False
    if type(norm.weight) is not nn.Parameter:  # a DTensor, say
        return False
    return not is_apart(norm)


def normals(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """Makes tensors of a shape on a CPU, always the same ones in the same order."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator, device="cpu").to(dtype)


class Given(nn.Module):
    """Stands in for a layer: gives always the same, of the very input alone."""

    def __init__(self, x: torch.Tensor, result: torch.Tensor) -> None:
        super().__init__()
        self.given = x, result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        if x is not self.given[0]:
            raise ValueError("a projection of something else")
        return self.given[1]


class GivenAnew(Given):
    """The same to who may write to it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of the result."""
        return super().forward(x).clone()


def of_cache(
    before: list[torch.Tensor], compute: Callable[[Any], Any]
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """What is computed with a cache that holds some tokens, and its keys and values afterwards."""
    from transformers.cache_utils import Cache, StaticLayer

    cached = StaticLayer(TRIED_ROOM)
    cached.update(*before)
    return compute(Cache(layers=[cached])), (cached.keys, cached.values)
