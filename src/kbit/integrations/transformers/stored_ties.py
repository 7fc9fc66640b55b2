"""Ties that a model declares, held against its files: they may hold a weight of both ends.

transformers loads both and ties what is equal by then. What differs stays two weights, as the table and the
head of T5 v1.1, whose config ties them as that of every T5 does. Layers are planned before anything is
loaded, so what is to be quantized is compared in the files.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kbit.format.names import PACKED
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import TensorInfo
from kbit.integrations.streaming.reader import are_equal

if TYPE_CHECKING:
    from kbit.integrations.transformers.plan import Route


def forget_broken(
    model: Any, policy: QuantizationPolicy, index: Mapping[str, TensorInfo], routes: Iterable[Route]
) -> None:
    """Have a model tie no pair of which its files hold two weights.

    Args:
        model: a PreTrainedModel; such pairs are taken out of its `all_tied_weights_keys`.
        policy, index: see `build_plan`.
        routes: of the tensors in the index.

    Raises:
        ValueError: a file has become shorter than its header says.
    """
    held = _held(routes)
    ties = getattr(model, "all_tied_weights_keys", {})
    for target, source in list(ties.items()):
        if target in held and source in held and _are_two(held[target], held[source], policy, index):
            del ties[target]


def _held(routes: Iterable[Route]) -> dict[str, Route]:
    """The routes of tensors that are parameters by themselves, by parameter."""
    return {route.target: route for route in routes if route.pattern is None}


def _are_two(one: Route, other: Route, policy: QuantizationPolicy, index: Mapping[str, TensorInfo]) -> bool:
    coded = [route.name + PACKED in index for route in (one, other)]
    if any(coded):
        return not all(coded)  # where both are codes, transformers compares these
    if not any(policy.bits_for(*route.modules) for route in (one, other)):
        return False  # here it compares the weights
    return not are_equal((one.name, index[one.name]), (other.name, index[other.name]))


def copies(model: Any, planned: Container[str], routes: Iterable[Route]) -> Iterator[tuple[str, Route]]:
    """(source, route) of weights that the files hold again, of which a policy has only the source quantized.

    As one weight both get the source's codes, so the files' copy is to be quantized like it.

    Args:
        model: see `forget_broken`, which comes first.
        planned: the parameters to be quantized.
        routes: of what is in the files.
    """
    held = _held(routes)
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if source in planned and target not in planned and target in held:
            yield source, held[target]
