"""Errors that ops raise, with the name of the layer: ops themselves are not told it."""

from __future__ import annotations

from kbit.format.words import with_place


def looked_up(error: IndexError, where: str = "") -> IndexError:
    """What `kbit::embedding` raised, with the layer's name and, where it lacks one, a remedy."""
    message = with_place(str(error), where)
    remedy = "" if ". " in message else " Are the ids those of another tokenizer?"
    return IndexError(message + remedy)


def placed(error: TypeError | ValueError, where: str) -> TypeError | ValueError:
    """What an op raised, with the layer's name, which ops do not know; errors of other types as they are."""
    known = not where or where in str(error) or type(error) not in (TypeError, ValueError)
    return error if known else type(error)(with_place(str(error), where))
