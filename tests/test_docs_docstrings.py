"""Public functions and classes say what they take, give and raise."""

import dataclasses
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import kbit

# What takes tensors must say shapes and dtypes; what follows needs none.
NO_TENSORS = {
    "dequantize_model",
    "explain",
    "quantize_model",
    "NonFiniteError",
    "KbitError",
    "NonFiniteWeightError",
}
SHAPE = re.compile(r"\[[^\]\n]*\]|\bshape\b")
DTYPE = re.compile(r"\b(?:float32|float16|bfloat16|uint8|int32|int64|dtype|int)\b")


def public(module):
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            yield f"{module.__name__}.{name}", thing


def members(name, thing):
    """A class's own public methods and properties."""
    for key, value in vars(thing).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        function = function.fget if isinstance(function, property) else function
        if not key.startswith("_") and inspect.isfunction(function):
            yield f"{name}.{key}", function


def test_completion_offers_what_is_public():
    assert set(kbit.__all__) <= set(dir(kbit))


@pytest.mark.parametrize("config", [kbit.KbitConfig, kbit.NVFP4Config])
def test_type_checkers_want_no_argument_of_a_config(config):
    """They read the fields of all bases; transformers' has one without a default."""
    of_constructor = {field.name: field.init for field in dataclasses.fields(config)}
    assert of_constructor["quant_method"] is False
    assert "quant_method" not in inspect.signature(config).parameters
    assert config().quant_method == config.quant_method == config().to_dict()["quant_method"]


API = (Path(__file__).parents[1] / "docs" / "api.md").read_text()


def test_the_page_of_the_api_names_everything_public():
    public = {
        *kbit.__all__,
        *kbit.nn.__all__,
        *kbit.nvfp4.__all__,
        *(key for key, _ in members("", kbit.QuantizedTensor)),
    }
    names = {name.lstrip(".") for name in public} - {"__version__", "CONTRACT_VERSION"}
    assert not [name for name in sorted(names) if not re.search(rf"\b{name}\b", API)]


@pytest.mark.parametrize("line", re.findall(r"^kbit\.[\w.]+\(.*\)$", API, re.M))
def test_the_page_of_the_api_has_signatures_as_they_are(line):
    path = line.partition("(")[0]
    signature = inspect.signature(functools.reduce(getattr, path.split(".")[1:], kbit))
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    signature = signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)
    assert line == f"{path}{signature}".replace("'", '"')


MODULES = [kbit, kbit.nn, importlib.import_module("kbit.nvfp4"), importlib.import_module("kbit.format")]
THINGS = {name: thing for module in MODULES for name, thing in public(module)}
FUNCTIONS = {name: thing for name, thing in THINGS.items() if inspect.isfunction(thing)}
CLASSES = {name: thing for name, thing in THINGS.items() if inspect.isclass(thing)}
METHODS = {
    name: f
    for key, cls in CLASSES.items()
    if cls.__module__.startswith("kbit")
    for name, f in members(key, cls)
}


def raises_something(function) -> bool:
    """Whether its own code raises, or hands arguments to checks that do."""
    source = inspect.getsource(function)
    return bool(re.search(r"^\s+raise \w+Error\b|\bchecks\.\w+\(|\bcheck_\w+\(", source, re.M))


@pytest.mark.parametrize("name", [*THINGS, *METHODS])
def test_everything_public_has_a_docstring(name):
    text = inspect.getdoc(THINGS.get(name) or METHODS[name]) or ""
    assert text.rstrip(), name
    assert text.split("\n")[0].rstrip().endswith((".", ":", "?")) or "\n" in text, text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_document_their_arguments_and_result(name):
    text, function = inspect.getdoc(FUNCTIONS[name]), FUNCTIONS[name]
    arguments = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
    for argument in arguments:
        assert re.search(rf"\b{argument}\b", text), f"{name} does not explain {argument}"
    if len(arguments) > 1:
        assert "Args:" in text, name
    if name.rpartition(".")[2] not in NO_TENSORS and "Tensor" in str(inspect.signature(function)):
        assert SHAPE.search(text), f"{name} tells no shape"
        assert DTYPE.search(text), f"{name} tells no dtype"


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_what_raises_says_so(name):
    function = FUNCTIONS.get(name) or METHODS[name]
    if raises_something(function):
        assert "Raises" in inspect.getdoc(function), f"{name} raises, and does not say what"
