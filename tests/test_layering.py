"""The shape of the source: imports point one way, files and functions are short, `import kbit` is light,
and every module can be the first to be imported."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
LAYERS = (
    "format",
    "quantizers",
    "ops",
    "backends",
    "dispatch",
    "nn",
    "nvfp4",
    "integrations",
    "bench",
    "cli",
)
# Belongs to no layer and imports nothing of kbit: anyone may have it.
BELOW_ALL = ("_version", "_startup", "_cpu")
MAX_PYTHON_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_CXX_LINES = 350

MODULES = sorted((SRC / "kbit").rglob("*.py"))
PYTHON_FILES = sorted(
    path
    for folder in ("src", "tests", "tools", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "__pycache__" not in path.parts
)
CXX_FILES = sorted(p for ext in ("*.cpp", "*.h", "*.cu", "*.cuh") for p in (SRC / "kbit").rglob(ext))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def layer_of(parts: tuple[str, ...]) -> str | None:
    """Layer of a dotted name inside kbit, as its parts after "kbit"; None for `kbit` itself."""
    return parts[0] if parts and parts[0] in LAYERS else None


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(line, parts after "kbit") of every import of kbit in a module, inside functions too.

    Imports under `if TYPE_CHECKING` count as well: a type from a higher layer is knowledge of it.
    """
    package = ("kbit", *path.relative_to(SRC / "kbit").parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                parts = tuple(name.name.split("."))
                if parts[0] == "kbit":
                    yield node.lineno, parts[1:]
        elif isinstance(node, ast.ImportFrom):
            base = tuple((node.module or "").split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            if base[:1] == ("kbit",):
                for name in node.names:
                    # `from kbit import nn` and `from kbit.nn import x` both name the layer nn.
                    yield node.lineno, (*base[1:], name.name)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_downwards(path: Path) -> None:
    layer = layer_of(path.relative_to(SRC / "kbit").with_suffix("").parts)
    if layer is None:
        assert path.parent == SRC / "kbit", (
            f"{relative(path)} is in no layer; layers are {', '.join(LAYERS)}."
        )
        return
    for line, parts in imported(ast.parse(path.read_text()), path):
        target = layer_of(parts)
        if target is None:
            # `import kbit` on top of a lower module would be a cycle. The command line stands above it.
            allowed = (parts[:1] and parts[0] in BELOW_ALL) or LAYERS.index(layer) >= LAYERS.index("bench")
            assert allowed, f"{relative(path)}:{line} imports kbit itself; import the layer below by name."
            continue
        assert LAYERS.index(target) <= LAYERS.index(layer), (
            f"{relative(path)}:{line} imports kbit.{'.'.join(parts)}, but {target} stands above {layer}. "
            f"The order is {' < '.join(LAYERS)}: move the code down or hand it in from above."
        )


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_python_files_are_short(path: Path) -> None:
    count = len(path.read_text().splitlines())
    # Parametrised tests read best in one piece; they may be longer.
    limit = MAX_PYTHON_LINES if path.is_relative_to(SRC) else 2 * MAX_PYTHON_LINES
    assert count <= limit, f"{relative(path)} has {count} lines, the limit is {limit}: split it by subject."


@pytest.mark.parametrize("path", CXX_FILES, ids=relative)
def test_cxx_files_are_short(path: Path) -> None:
    count = len(path.read_text().splitlines())
    assert count <= MAX_CXX_LINES, f"{relative(path)} has {count} lines, the limit is {MAX_CXX_LINES}."


def kbit_modules(tree: ast.Module) -> dict[str, types.ModuleType]:
    """Modules of kbit by the names that a file gives to them and to nothing else."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(r"kbit\b(?!.*\bvllm)", node.module or ""):
            package = importlib.import_module(node.module)
            found.update({name.asname or name.name: getattr(package, name.name, None) for name in node.names})
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.pop(node.id, None)
        elif isinstance(node, ast.arg):
            found.pop(node.arg, None)
    return {name: module for name, module in found.items() if isinstance(module, types.ModuleType)}


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_modules_have_what_is_used_of_them(path: Path) -> None:
    """A test of a GPU's runs where there is one: it must not wait until then to miss what was renamed."""
    tree = ast.parse(path.read_text())
    modules = kbit_modules(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            assert hasattr(module, node.attr) or isinstance(node.ctx, ast.Store), (
                f"{relative(path)}:{node.lineno}: {module.__name__} has no {node.attr}"
            )


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = function.body
    if ast.get_docstring(function) is not None:
        body = body[1:]
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_functions_are_short(path: Path) -> None:
    long = [
        f"{relative(path)}:{node.lineno} {node.name}: {body_lines(node)} lines"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not long, f"functions over {MAX_FUNCTION_LINES} lines without docstring: " + "; ".join(long)


def test_import_kbit_imports_nothing_slow_but_torch() -> None:
    code = "import sys, kbit; print(*{'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "", "`import kbit` must stay light; import what is slow where it is used."


# The import of any module begins with that of its packages, so one process imports a package and forks for
# each module in it. The first also takes in what most of them need, which halves the time; but not
# transformers' quantizers, because kbit has some of its own modules imported right after those.
FIRST_IMPORTS = """
import gc, importlib, os, sys, traceback
import kbit
import torch.distributed.tensor, transformers.utils

assert "transformers.quantizers" not in sys.modules
gc.disable()


def import_first(name):
    if name not in sys.modules:
        gc.freeze()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            print(name, flush=True)
            os._exit(1)
        import_all_in(name)
        os._exit(0)
    import_all_in(name)


def import_all_in(package):
    for name in sys.argv[1:]:
        if name.rpartition(".")[0] == package:
            import_first(name)


import_all_in("kbit")
"""


@pytest.mark.parametrize(
    "package",
    [
        "kbit.nn",
        "kbit.backends.cuda",
        "kbit.bench",
        "kbit.integrations.transformers",
        "kbit.integrations.vllm",
    ],
)
def test_large_packages_say_where_what_is(package):
    module = importlib.import_module(package)
    known = set(re.findall(r"\w+", module.__doc__))
    assert not {info.name for info in pkgutil.iter_modules(module.__path__)} - known


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    dotted = [".".join(path.relative_to(SRC).with_suffix("").parts) for path in MODULES]
    names = [name.removesuffix(".__init__") for name in dotted]
    if find_spec("vllm") is None:  # which the environment of tests/test_vllm.py has
        names = [name for name in names if not name.startswith("kbit.integrations.vllm.")]
    command = [sys.executable, "-c", FIRST_IMPORTS, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not result.stdout, f"cannot be imported first: {result.stdout.split()}.\n{result.stderr}"
