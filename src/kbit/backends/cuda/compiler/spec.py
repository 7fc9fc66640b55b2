"""Which kernel, in which configuration, and the source text that this amounts to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbit.backends.cuda.compiler.instructions import WGMMA_HEADER, wgmma_header

CSRC = Path(__file__).parents[1] / "csrc"
CONFIG_HEADER = "config.h"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with its compile-time configuration; the same for every architecture.

    A source holds one kernel, `extern "C" __global__ void <stem of the file>(...)`, and includes "config.h",
    which is made from `config`.

    Attributes:
        source: file in csrc/, such as "stream.cu".
        config: (name, value) pairs in the order of the name.
    """

    source: str
    config: tuple[tuple[str, int | bool], ...] = ()

    def __post_init__(self) -> None:
        if not self.source.endswith(".cu") or not self.entry.isidentifier():
            raise ValueError(f"kernel source {self.source!r} must be <name of the kernel>.cu.")
        for name, value in self.config:
            if not name.isidentifier():
                raise ValueError(f"{self.source}: config name {name!r} is no C++ identifier.")
            if type(value) not in (int, bool) or not -(2**31) <= value < 2**31:
                raise ValueError(
                    f"{self.source}: config {name} must be a bool or a 32-bit int, got {value!r}."
                )
        # Kernels are looked up by their spec at every launch.
        object.__setattr__(self, "_hash", hash((self.source, self.config)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self) -> tuple[Any, ...]:  # hashes of strings differ from process to process
        return KernelSpec, (self.source, self.config)

    @classmethod
    def make(cls, source: str, **config: int | bool) -> KernelSpec:
        """The spec with its configuration as keywords, whose order is kept."""
        return cls(source, tuple(config.items()))

    @property
    def entry(self) -> str:
        """Name of the kernel's function."""
        return self.source.removesuffix(".cu")

    @property
    def name(self) -> str:
        """Name for messages and tables, such as "stream[bits=4,bf16=0]"."""
        return f"{self.entry}[{','.join(f'{name}={int(value)}' for name, value in self.config)}]"

    @property
    def config_header(self) -> str:
        """Text of "config.h": the configuration as a struct of constants."""
        lines = [
            f"    static constexpr {type(value).__name__} {name} = {str(value).lower()};"
            for name, value in self.config
        ]
        return "\n".join(["#pragma once", "struct Config {", *lines, "};", ""])


@dataclass(frozen=True)
class Sources:
    """All text that a kernel is compiled from.

    Attributes:
        name: of the main file, for the compiler's messages.
        text: the main file.
        headers: name and text of whatever it includes, "config.h" among them.
    """

    name: str
    text: str
    headers: dict[str, str]


def read_sources(spec: KernelSpec, csrc: Path = CSRC) -> Sources:
    """Read a kernel's source and the headers that it reaches, so that editing another changes no key.

    Raises:
        FileNotFoundError: the source or one of its headers is not in `csrc`.
    """
    text = (csrc / spec.source).read_text()
    headers = {CONFIG_HEADER: spec.config_header}
    config = dict(spec.config)
    if f'"{WGMMA_HEADER}"' in text:
        headers[WGMMA_HEADER] = wgmma_header(config["tokens"], bool(config["bf16"]))
    waiting = INCLUDE.findall(text)
    while waiting:
        name = waiting.pop()
        if name not in headers:
            headers[name] = (csrc / name).read_text()
            waiting += INCLUDE.findall(headers[name])
    return Sources(spec.source, text, dict(sorted(headers.items())))
