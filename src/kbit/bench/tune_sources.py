"""Digest of what `kbit tune` measures: the kernels that compete, and the modules that launch them.

Times of other sources are of no use beside those in a table. What changes no time is left out of the digest:
comments, docstrings, layout of the text, and kernels that do not compete.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from pathlib import Path

from kbit.backends.cuda import (
    mma,
    mma_config,
    operands,
    stream,
    stream_config,
    stream_preference,
    wgmma,
    wgmma_config,
    wgmma_estimate,
)
from kbit.backends.cuda.compiler import CSRC, KernelSpec
from kbit.backends.cuda.compiler.spec import CONFIG_HEADER, read_sources

# stream.cu, wgmma.cu, mma.cu, and what decodes for cuBLAS. Of wgmma.cu any configuration: its instruction is
# made.
_NAMES = ("stream.cu", "mma.cu", "mma_sums.cu", "dequantize_tiled.cu")
_KERNELS = (*(KernelSpec(name) for name in _NAMES), wgmma_config.specs()[0])
_OF_WGMMA, _OF_STREAM = (wgmma, wgmma_config, wgmma_estimate), (stream, stream_config, stream_preference)
_LAUNCHERS = (operands, *_OF_STREAM, *_OF_WGMMA, mma, mma_config)
# Strings come first: what looks like a comment in one is none.
_STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def sources_digest(csrc: Path = CSRC) -> str:
    """16 hexadecimal digits.

    Args:
        csrc: folder of the kernels' sources.
    """
    texts: dict[str, str] = {}
    for spec in _KERNELS:
        sources = read_sources(spec, csrc)
        texts |= {sources.name: sources.text} | sources.headers
    del texts[CONFIG_HEADER]  # made by the launching modules
    found = {name: cxx_code(text) for name, text in texts.items()}
    for module in _LAUNCHERS:
        path = Path(str(module.__file__))
        found[path.name] = python_code(path.read_text(encoding="utf-8"))
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


def cxx_code(text: str) -> str:
    """C++ without comments, each run of blanks and line ends as one blank."""
    return " ".join(_STRING_OR_COMMENT.sub(lambda found: found[1] or " ", text).split())


def python_code(text: str) -> str:
    """Python without comments, docstrings and empty lines; any version of Python finds the same."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())
