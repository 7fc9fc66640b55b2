"""Other libraries' formats beside kbit's: `kbit eval --peers`, with stand-ins for the libraries."""

from __future__ import annotations

import ctypes
import json
import sys
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kbit.bench import quality_peers
from kbit.bench.quality import sharing_copy
from kbit.bench.quality_peers import Format, Stored, by_size, formats, quantize
from kbit.cli import app
from tiny_models import build_with_tokenizer

WORDS = " ".join(f"w{i * 7 % 72}" for i in range(300))
LIBRARIES = {library.package: library for library in quality_peers.LIBRARIES}


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Put a module with some content, and packages around it, where imports find them."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        package = ModuleType(".".join(parts[:count]))
        package.__path__ = []
        monkeypatch.setitem(sys.modules, package.__name__, package)
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


# -- stand-ins: the calls of the libraries, and tensors of the sizes that they make ------------------------


def quantize_4bit(A, *, blocksize, compress_statistics, quant_type):
    assert quant_type in ("nf4", "fp4")
    blocks = A.numel() // blocksize
    state = SimpleNamespace(absmax=torch.zeros(blocks), kept=A + 1)
    if compress_statistics:
        state.absmax = torch.zeros(blocks, dtype=torch.uint8)
        state.state2, state.offset = SimpleNamespace(absmax=torch.zeros(-(-blocks // 256))), torch.zeros(())
    return torch.zeros(A.numel() // 2, 1, dtype=torch.uint8), state


class Quantizer:
    @classmethod
    def quantize(cls, tensor, nbits, group_size, device, compute_dtype):
        assert tensor.numel() % group_size == 0, "group_size should be divisible"
        assert device == "cpu"
        scale = torch.ones(tensor.numel() // group_size, 1)
        meta = {
            "scale": scale,
            "zero": scale.clone(),
            "shape": tensor.shape,
            "kept": tensor.to(compute_dtype),
        }
        return torch.zeros(tensor.numel() * nbits // 8, dtype=torch.uint8), meta

    @classmethod
    def to_inplace(cls, codes, meta, device):
        halves = {name: meta[name].to(meta["compute_dtype"]) for name in ("scale", "zero")}
        cls.kept = meta.pop("kept")
        return codes, meta | halves

    @classmethod
    def dequantize(cls, codes, meta):
        return cls.kept.reshape(-1, 8)  # in another shape than it came


def BaseQuantizeConfig(nbits, group_size):
    return {"weight_quant_params": {"nbits": nbits, "group_size": group_size}}


class Kind(IntEnum):
    Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, IQ4_NL, IQ4_XS, IQ2_S, IQ3_S, MXFP4 = range(13)


SIZES = {kind: (256, 100 + kind) if kind.name[-2:] in ("_K", "_S", "XS") else (32, 18) for kind in Kind}


def ggml_quantize_chunk(kind, source, target, start, rows, columns, imatrix):
    assert (start.value, imatrix) == (0, None)
    block, size = SIZES[Kind(kind.value)]
    ctypes.memset(target, kind.value, rows.value * columns.value // block * size)
    return rows.value * columns.value // block * size


def decoded(packed, kind):
    """As many weights as the blocks have, each the number of the kind in which they were."""
    block, size = SIZES[kind]
    assert np.all(packed == kind)
    return np.full((packed.shape[0], packed.shape[1] // size * block), float(kind), dtype=np.float32)


def packed(data, kind):
    block, size = SIZES[kind]
    return np.full((data.shape[0], data.shape[1] // block * size), kind, dtype=np.uint8)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, as stand-ins; transformers, which remembers what it finds, must not look meanwhile."""
    module(
        monkeypatch,
        "bitsandbytes.functional",
        quantize_4bit=quantize_4bit,
        dequantize_4bit=lambda codes, state: state.kept,
    )
    module(monkeypatch, "hqq.core.quantize", Quantizer=Quantizer, BaseQuantizeConfig=BaseQuantizeConfig)
    quants = SimpleNamespace(quantize=packed, dequantize=decoded)
    module(monkeypatch, "gguf", GGMLQuantizationType=Kind, GGML_QUANT_SIZES=SIZES, quants=quants)
    lib = SimpleNamespace(ggml_quantize_chunk=ggml_quantize_chunk)
    module(monkeypatch, "llama_cpp._ggml", libggml=lib)


def stored(name: str, w: torch.Tensor) -> Stored:
    (form,) = (form for form in formats()[0] if form.name == name)
    return form.make(w)


# -- libraries ---------------------------------------------------------------------------------------------


def test_a_library_that_is_absent_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bitsandbytes", "hqq", "gguf", "llama_cpp"):
        monkeypatch.setitem(sys.modules, name, None)
        for loaded in [each for each in sys.modules if each.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)
    found, absent = formats()
    assert [form.package for form in found] == ["torch"]
    assert [line.rpartition(": ")[2] for line in absent] == [
        f"pip install {package}" for package in LIBRARIES if package != "torch"
    ]


def test_a_library_that_breaks_at_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("CUDA Setup failed\nlong advice")

    monkeypatch.setattr(quality_peers.importlib, "import_module", broken)
    found, absent = formats([LIBRARIES["hqq"]])
    assert not found
    assert absent == ["hqq is left out, since it cannot be imported (CUDA Setup failed): pip install hqq"]


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bitsandbytes NF4", 4 + 32 / 64),
        ("bitsandbytes FP4", 4 + 32 / 64),
        # A byte for 64, a float32 for 256 of them, and one offset.
        ("bitsandbytes NF4, double", 4 + 8 / 64 + 32 / (64 * 256) + 32 / 2**15),
        ("HQQ 2 bits", 2 + 32 / 64),
        ("HQQ 4 bits", 4 + 32 / 64),
        ("GGUF Q4_0", 18 / 4),
        ("GGUF IQ4_NL", 18 / 4),
        ("GGUF Q4_K", (100 + Kind.Q4_K) / 32),
        ("rounded int4", 4 + 20 / 64),
    ],
)
def test_sizes_are_those_of_the_tensors_that_are_made(name: str, bits: float) -> None:
    assert 8 * stored(name, torch.randn(64, 512)).nbytes / 2**15 == bits


@pytest.mark.usefixtures("libraries")
def test_rows_without_whole_blocks_get_what_llama_cpp_takes() -> None:
    for kind, other in {"Q3_K": "Q4_0", "Q4_K": "Q5_0", "IQ4_XS": "IQ4_NL"}.items():
        found = stored(f"GGUF {kind}", torch.zeros(4, 192))
        assert torch.equal(found.values, torch.full((4, 192), float(Kind[other])))
        assert found.nbytes == 4 * 192 // 32 * 18
    with pytest.raises(ValueError, match="rows of 40 are not whole blocks of 32"):
        stored("GGUF Q4_K", torch.zeros(4, 40))


def test_rounded_integers() -> None:
    w = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    groups, values = w.view(-1, 64), stored("rounded int4", w).values.view(-1, 64)
    step = ((groups.amax(-1) - groups.amin(-1)) / 15).unsqueeze(-1)
    assert ((values - groups).abs() < 1.01 * step).all()
    assert all(len(group.unique()) <= 16 for group in values)
    assert not stored("rounded int4", torch.zeros(2, 64)).values.any()
    # Of numbers on the grid nothing is lost, wherever 0 is on it.
    grid = (torch.arange(64) % 16 - 5.0).view(1, 64)
    assert torch.equal(stored("rounded int4", grid).values, grid)
    with pytest.raises(ValueError, match="rows of 72 are not whole groups of 64"):
        stored("rounded int4", torch.zeros(2, 72))


def test_real_gguf_types_have_the_sizes_that_llama_cpp_states() -> None:
    pytest.importorskip("gguf")
    w = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    for kind, bits in {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0}.items():
        found = stored(f"GGUF {kind}", w)
        assert 8 * found.nbytes / w.numel() == bits
        assert 0 < float((found.values - w).square().mean()) < 0.02


# -- models ------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(3, 2, 64))


@pytest.fixture
def model() -> nn.ModuleDict:
    parts = {"embed": nn.Embedding(5, 64), "head": nn.Linear(64, 5), "experts": Experts()}
    made = nn.ModuleDict(parts)
    made["head"].weight = made["embed"].weight
    return made


def halved(w: torch.Tensor) -> Stored:
    assert w.dim() == 2
    return Stored(w / 2, w.numel())


def test_weights_get_the_values_of_a_format(model: nn.ModuleDict) -> None:
    copied = sharing_copy(model)
    places = [("embed", "weight"), ("experts", "down_proj")]
    figures = quantize(copied, places, Format("some", "half", "some", None, halved))
    assert figures == {"bits_per_weight": 8.0, "nmse": pytest.approx(0.25)}
    assert torch.equal(copied["experts"].down_proj, torch.full((3, 2, 64), 0.5))
    assert copied["head"].weight is copied["embed"].weight, "a tied weight stays tied"
    assert torch.equal(copied["head"].weight, model["embed"].weight / 2)
    assert copied["head"].bias is model["head"].bias
    assert torch.equal(model["experts"].down_proj, torch.ones(3, 2, 64)), "the unquantized model is as it was"


def test_a_refusal_names_the_weight(model: nn.ModuleDict) -> None:
    def refusing(w: torch.Tensor) -> Stored:
        raise AssertionError("group_size\nmore")

    message = r"^some strict is left out, since it refuses experts.down_proj \(2, 64\): group_size$"
    with pytest.raises(ValueError, match=message):
        quantize(
            sharing_copy(model),
            [("experts", "down_proj")],
            Format("some", "strict", "package", None, refusing),
        )


def test_rows_of_similar_size_stand_together() -> None:
    sizes = {"a": (4.5, 0.2), "b": (2.25, 0.5), "c": (4.5, 0.1), "d": (4.25, 0.3)}
    rows = [{"model": name, "bits_per_weight": b, "kl_divergence": k} for name, (b, k) in sizes.items()]
    ordered = by_size([*rows, {"model": "whole", "kl_divergence": None}])
    assert [row["model"] for row in ordered] == ["whole", "b", "d", "c", "a"]


# -- the command -------------------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(WORDS)
    folder = build_with_tokenizer("qwen3_moe", tmp_path / "in")
    return ["eval", str(folder), "--text", str(text), "--window", "60", "--bits", "4"]


def seen_by(given: list[str], tmp_path: Path, *options: str) -> tuple[dict, str]:
    file = tmp_path / "result.json"
    run = CliRunner().invoke(app, [*given, *options, "--peers", "--json", str(file)])
    assert run.exit_code == 0, run.output
    return json.loads(file.read_text()), " ".join(run.output.split())


def test_peers_get_the_weights_that_kbit_quantizes(
    tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, ...]] = []

    def recording(w: torch.Tensor) -> Stored:
        sizes.append(tuple(w.shape))
        return halved(w)

    monkeypatch.setattr(
        quality_peers,
        "formats",
        lambda: ([Format("some", "half", "package", "1.2", recording)], ["other: pip"]),
    )
    result, output = seen_by(given, tmp_path)
    _, ours, row = result["rows"]
    assert sizes.count((48, 48)) == sizes.count((48, 24)) == 4, "gate and up, and down, of each expert"
    assert row["nmse"] == pytest.approx(0.25)
    assert (row["bits"], row["bits_per_weight"], row["peer"], row["method"]) == (None, 8.0, "some", "half")
    assert row["tokens"] == ours["tokens"]
    assert row["kl_divergence"] > ours["kl_divergence"] > 0
    assert result["peers"] == {"package": "1.2"}
    assert "warning: other: pip" in output
    # Embeddings only where kbit has them quantized, too.
    before = sizes.count((72, 48))
    sizes.clear()
    seen_by(given, tmp_path, "--embedding-bits", "5")
    assert sizes.count((72, 48)) == before + 2, "embedding and head"


def test_what_refuses_a_shape_is_left_out(
    tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, absent = formats([LIBRARIES["torch"]])
    monkeypatch.setattr(
        quality_peers, "formats", lambda: ([*found, Format("some", "half", "package", None, halved)], absent)
    )
    result, output = seen_by(given, tmp_path)
    assert [row["method"] for row in result["rows"]] == ["unquantized", "search", "half"]
    assert output.count("rounded int4 is left out, since it refuses") == 1
    assert "rows of 48 are not whole groups of 64" in output
    assert str(tmp_path) not in json.dumps(result)
