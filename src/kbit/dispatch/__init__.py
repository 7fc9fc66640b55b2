"""Which backend answers an op. Importing this package registers the implementations of `torch.ops.kbit.*`."""

from kbit.dispatch import (  # noqa: F401  (imported for their registrations)
    attention,
    attention_rests,
    caches,
    gated_delta,
    heads,
    latent,
    masks,
    moe,
    norm,
    one_shot,
    ops,
    rotary,
    tiled,
)
from kbit.dispatch.backends import Backend, backend_for, backends
from kbit.dispatch.explain import explain

__all__ = ["Backend", "backend_for", "backends", "explain"]
