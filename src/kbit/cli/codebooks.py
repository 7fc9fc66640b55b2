"""`--codebook`: a name, or levels in a JSON file."""

from __future__ import annotations

import re
from pathlib import Path

from kbit.format.codebook import CODEBOOKS
from kbit.format.policy import Codebook
from kbit.format.strict_json import parse_json

_WIDTH = re.compile("[1-9][0-9]?")  # of "2" and "02" one would be dropped
_FORMS = 'a list of 2^bits numbers, or of several widths an object such as {"3": [...], "4": [...]}'


def parse_codebook(given: str) -> Codebook:
    """A policy's codebook of what the option got; its levels are checked by the policy.

    Args:
        given: a name of `kbit.format.codebook.CODEBOOKS`, or a JSON file.

    Raises:
        OSError: the file cannot be read.
        ValueError: no name and no file, or one that holds something else.
    """
    path = Path(given)
    if given in CODEBOOKS:
        return given
    if path.suffix != ".json" and not path.is_file():
        names = ", ".join(CODEBOOKS)
        raise ValueError(
            f"unknown codebook {given!r}; known: {names}. Or name a JSON file that holds {_FORMS}."
        )
    try:
        levels = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"--codebook {given}: {error}. It must hold {_FORMS}.") from None
    if isinstance(levels, list):
        return levels
    if not isinstance(levels, dict) or not all(map(_WIDTH.fullmatch, levels)):
        raise ValueError(f"--codebook {given} must hold {_FORMS}, got {str(levels)[:80]}.")
    return {int(width): numbers for width, numbers in levels.items()}
