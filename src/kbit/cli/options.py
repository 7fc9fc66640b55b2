"""Options that several commands have, and values of options that are joined by commas."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kbit.format.codebook import SUPPORTED_BITS

Threads = Annotated[int, typer.Option(min=1, max=1024, help="Threads, for kbit and torch alike.")]


# As `kbit bench` and most people write them.
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def long_dtype(name: str) -> str:
    """torch's name of a dtype that may be called in short, such as fp16; others as they are."""
    return SHORT_DTYPES.get(name, name)


def in_options(text: str) -> str:
    """A message with the remedy that is an argument in Python as the option that it is here."""
    return text.replace("embedding_bits=", "--embedding-bits ")


def speak_of_options() -> None:
    """Have what loading a model warns of speak of options, too."""
    logging.getLogger("kbit.integrations.transformers.quantizer").addFilter(_spoken)


def _spoken(record: logging.LogRecord) -> bool:
    record.msg, record.args = in_options(record.getMessage()), None
    return True


def words(text: str) -> list[str]:
    """What stands between commas, without spaces around it and without empty ones."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Positive whole numbers.

    Raises:
        ValueError: there are none, or others.
    """
    found = words(text)
    # Nine digits, for sizes of tensors are made of them.
    if not found or not all(word.isdecimal() and len(word) < 10 and int(word) for word in found):
        raise ValueError(
            f"{option} takes positive whole numbers below 10^9, such as 1,2,4; got {text[:80]!r}."
        )
    return [int(word) for word in found]


def labels(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by what tables call them: their names, or their paths where names would be the same.

    Raises:
        ValueError: one is given twice.
    """
    ends = [folder.resolve().name for folder in folders]
    found: dict[str, Path] = {}
    for end, folder in zip(ends, folders, strict=True):
        label = end if ends.count(end) == 1 else str(folder)
        if label in found:
            raise ValueError(f"{folder} is given twice. Give each model once.")
        found[label] = folder
    return found


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Some of the names that are known.

    Raises:
        ValueError: there are none, or others.
    """
    found = words(text)
    if not found or not set(found) <= set(known):
        raise ValueError(f"{option} takes {', '.join(known)}, joined by commas; got {text!r}.")
    return found


def widths(text: str) -> list[int]:
    """Widths of codes, of an option --bits.

    Raises:
        ValueError: there are none, or others than the format has.
    """
    return [int(width) for width in names("--bits", text, [str(width) for width in SUPPORTED_BITS])]


def one_of(option: str, text: str, known: Sequence[str]) -> None:
    """Raises ValueError where an option names none of what is known."""
    if text not in known:
        raise ValueError(f"{option} takes {', '.join(known[:-1])} or {known[-1]}; got {text!r}.")
