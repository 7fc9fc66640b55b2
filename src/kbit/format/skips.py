"""Modules that are left as they are by name: `modules_to_not_convert` of every quantization config."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def names_to_skip(names: Iterable[str] | None) -> list[str] | None:
    """`modules_to_not_convert` as a list: an iterator could be read once only, and JSON has no sets.

    Raises:
        TypeError: it holds something else than names, or is one.
        ValueError: a name is empty.
    """
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"modules_to_not_convert must be a list of names, got {names!r}.")
    found = list(names)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"modules_to_not_convert must be a list of names only, got {found!r}.")
    if "" in found:
        raise ValueError(f"modules_to_not_convert has an empty name, which is no module's: {found!r}.")
    return found


def is_inside(module_name: str, skipped: str) -> bool:
    """Whether a name of `modules_to_not_convert` skips a module: it is the module's, or that of a parent."""
    return module_name == skipped or module_name.startswith(skipped + ".")


def why_skipped(names: Sequence[str], skips: Iterable[str] | None) -> str | None:
    """Why `modules_to_not_convert` skips a module of these names; None where it does not."""
    for skipped in skips or ():
        if any(is_inside(name, skipped) for name in names):
            return f"modules_to_not_convert has {skipped!r}"
    return None
