"""What the user forces: KBIT_BACKEND and KBIT_KERNEL in the environment, as every product looks them up.

`os.environ.get` takes half a microsecond, since it raises and catches an error where a variable is not set;
a product's launch takes five.
"""

from __future__ import annotations

import os
from typing import Any

# The dictionary of bytes, or of strings on Windows, below os.environ. Where there is none, os.environ itself.
_variables: Any = getattr(os.environ, "_data", os.environ)


def _key(name: str) -> str | bytes:
    return name if _variables is os.environ else os.environ.encodekey(name)


_BACKEND, _KERNEL = _key("KBIT_BACKEND"), _key("KBIT_KERNEL")


def backend() -> str | None:
    """KBIT_BACKEND; None where it is not set, or empty."""
    forced = _variables.get(_BACKEND)
    return os.fsdecode(forced) if forced else None


def kernel() -> str | None:
    """KBIT_KERNEL; None where it is not set, or empty."""
    forced = _variables.get(_KERNEL)
    return os.fsdecode(forced) if forced else None
