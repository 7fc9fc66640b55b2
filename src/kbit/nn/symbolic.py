"""torch.fx: a call of a quantized layer is one node of a graph, as a call of one of torch.nn's layers is.

A tracer of torch.fx takes modules of other libraries apart, and a product with codes has no parts that it
could see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from kbit.format.words import at
from kbit.nn.support import is_apart

_AS_A_LEAF = (
    "Trace by a torch.fx.Tracer whose is_leaf_module is true of every kbit.nn.QuantizedModule: it records a "
    "call and runs none."
)


def call_of(layer: nn.Module, name: str, forward: Callable[..., Any], *inputs: Any) -> Any:
    """The node that calls a layer, in the graph that torch.fx is tracing.

    Args:
        layer: it is being called.
        name: its name in its model, for messages; "" if unknown.
        forward: its class's, which asks.
        inputs: what the layer got, in the order of its arguments.

    Returns:
        The `torch.fx.Proxy` of its result; None if no input is one.

    Raises:
        TypeError: the graph's call would not be all that this one is.
    """
    from torch.fx import Proxy, Tracer  # only where an input is no tensor

    proxy = next((each for each in inputs if isinstance(each, Proxy)), None)
    if proxy is None or not isinstance(proxy.tracer, Tracer):
        return None
    what = f"torch.fx cannot trace {type(layer).__name__}{at(name)}"
    path = proxy.tracer.path_of_module(layer)
    if not path:
        raise TypeError(f"{what} by itself. Trace a module that holds it.")
    if type(layer).forward is not forward or is_apart(layer):
        # These run now, on symbols, and would run again whenever the graph calls the layer.
        raise TypeError(f"{what}, which has hooks or a forward of its own. {_AS_A_LEAF}")
    return proxy.tracer.create_proxy("call_module", path, inputs, {})
