"""Which backend answers an op. Importing this package registers the implementations of `torch.ops.kbit.*`."""

from kbit.dispatch import ops  # noqa: F401  (imported for its registrations)
from kbit.dispatch.backends import Backend, backend_for, backends

__all__ = ["Backend", "backend_for", "backends"]
