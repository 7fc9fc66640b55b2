"""Rotary embeddings in one kernel, `kbit::rotary`.

transformers turns queries and keys by `apply_rotary_pos_emb`, of which most families have a copy: ten small
operators, whose launches take a GPU longer than a quantized layer's weights, and of a prompt they read and
write queries and keys ten times. A family's function is tried first: what gives something else, stays.
torch.compile fuses it by itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import torch

from kbit.nn.standing_in import standing_in, trial
from kbit.ops import checks, grad_checks

# What families call their functions; in the second neighbouring columns are pairs.
NAME, INTERLEAVING = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"
_TRIED_COLUMNS, _TRIED_TOKENS = 32, 3
_modules: weakref.WeakKeyDictionary[Any, list[ModuleType]] = weakref.WeakKeyDictionary()


def rotary_modules(model: Any) -> list[ModuleType]:
    """The Python modules of a model's classes that have such a function."""
    if model not in _modules:
        _modules[model] = _having(
            {cls.__module__ for layer in model.modules() for cls in type(layer).__mro__}
        )
    return _modules[model]


def modules_of(forward: Callable[..., Any]) -> list[ModuleType]:
    """That whose function an attention's forward turns by; none for one that is given no angles.

    Nor for one that the kernel could never stand in for: whoever asks does so in every layer's call.
    """
    return _modules_of(inspect.unwrap(forward))  # what stands in for it is another one every time


@functools.cache
def _modules_of(forward: Callable[..., Any]) -> list[ModuleType]:
    if "position_embeddings" not in inspect.signature(forward).parameters:
        return []
    return [module for module in _having({forward.__module__}) if any(_known_in(module))]


def _having(names: Iterable[str]) -> list[ModuleType]:
    found = (sys.modules[name] for name in sorted(names) if name in sys.modules)
    return [module for module in found if _functions(module)]


def _functions(module: ModuleType) -> list[str]:
    return [name for name in _MAKERS if inspect.isfunction(getattr(module, name, None))]


def _known_in(module: ModuleType) -> Iterator[bool]:
    for name in _functions(module):
        own = getattr(module, name)
        yield _MAKERS[name](own) is not own


@contextlib.contextmanager
def fused_rotary(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Layers of these modules turn queries and keys in one kernel where that gives what they give."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name in _functions(module):
                stack.enter_context(standing_in(module, name, _MAKERS[name]))
        yield


@functools.cache
def _fused(own: Callable[..., Any], interleaved: bool = False) -> Callable[..., Any]:
    """A family's function, by the kernel where that gives the same; itself where it never does."""
    tried = (_TRIED_COLUMNS, _TRIED_COLUMNS // 2)
    turned = {columns for columns in tried if _is_rotary(own, columns, interleaved)}
    if not turned:
        return own
    partly = _TRIED_COLUMNS // 2 in turned

    @functools.wraps(own)
    def fused(query: Any, key: Any, cos: Any, sin: Any, *more: Any, **named: Any) -> Any:
        if more or named or not _takes(query, key, cos, sin):
            return own(query, key, cos, sin, *more, **named)
        if cos.shape[-1] != query.shape[-1] and not partly:
            return own(query, key, cos, sin)  # which refuses them
        return torch.ops.kbit.rotary(query, key, cos, sin, interleaved)

    return fused


# What makes what stands in for functions of these names.
_MAKERS: dict[str, Callable[[Any], Any]] = {
    NAME: _fused,
    INTERLEAVING: functools.partial(_fused, interleaved=True),
}


def _takes(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    tensors = (query, key, cos, sin)
    if torch.compiler.is_compiling() or not query.is_cuda or query.dtype not in checks.HALF_DTYPES:
        return False
    if any(type(tensor) is not torch.Tensor or tensor.dtype != query.dtype for tensor in tensors):
        return False
    if grad_checks.wants_grad(*tensors) or grad_checks.in_transform() or torch.is_autocast_enabled("cuda"):
        return False
    return query.dim() == key.dim() == 4 and cos.dim() == sin.dim() == 3 and _belong(*tensors)


def _belong(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether shapes are those of `kbit::rotary`; a model's function may broadcast others."""
    batch, _, tokens, columns = query.shape
    alike = (len(key), *key.shape[2:]) == (batch, tokens, columns) and cos.shape == sin.shape
    return alike and len(cos) in (1, batch) and cos.shape[1] == tokens and cos.shape[2] <= columns


@trial
def _is_rotary(own: Callable[..., Any], turned: int, interleaved: bool = False) -> bool:
    """Whether a function gives what `kbit::rotary` gives, of heads whose first columns are turned."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").bfloat16()

    query, key = (normal(2, heads, _TRIED_TOKENS, _TRIED_COLUMNS) for heads in (4, 2))
    given = (query, key, normal(2, _TRIED_TOKENS, turned), normal(2, _TRIED_TOKENS, turned))
    made = own(*given)
    return all(map(torch.equal, made, torch.ops.kbit.rotary(*given, interleaved))) and len(made) == 2
