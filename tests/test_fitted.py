"""Codebooks of least squared error, and the named one that was made so."""

from __future__ import annotations

import json

import pytest
import torch

import kbit
from kbit.format import SUPPORTED_BITS, get_codebook
from kbit.format.codebook import validate_codebook
from kbit.quantizers import fitted


@pytest.fixture(autouse=True)
def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough for two digits of errors."""
    monkeypatch.setattr(fitted, "_SAMPLE", 2**15)


def normal(rows: int = 256, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def error(w: torch.Tensor, bits: int, codebook: str | torch.Tensor, **how: object) -> float:
    decoded = kbit.dequantize(kbit.quantize(w, bits, codebook=codebook, **how))
    return float((decoded - w).square().sum() / w.square().sum())


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_the_named_codebook_is_what_fits_normal_weights(bits: int) -> None:
    """A fit to a few of them is no better for others, and hardly worse."""
    mine, named, others = kbit.fit_codebook(normal(), bits), kbit.block_optimal_float(bits), normal(seed=1)
    assert error(others, bits, named) < error(others, bits, mine) * 1.0005
    assert error(others, bits, mine) < error(others, bits, named) * 1.04


@pytest.mark.parametrize(("bits", "gain"), [(2, 0.9995), (3, 0.995), (4, 0.96), (5, 0.955)])
def test_it_has_less_error_than_normal_float(bits: int, gain: float) -> None:
    w = normal(512, 1024, seed=2)
    assert error(w, bits, "bof") < gain * error(w, bits, "nf")


@pytest.mark.parametrize("how", [{"search": False}, {"scale": "float16"}, {"symmetric": False}], ids=str)
def test_what_is_fitted_fits_best_what_it_was_fitted_for(how: dict[str, object]) -> None:
    """Weights of another distribution than the normal one: uniform, and all but a few above 0."""
    w = torch.rand(256, 256, generator=torch.Generator().manual_seed(3)) - 0.1
    levels = kbit.fit_codebook(w, 3, **how)
    validate_codebook(levels, 3)
    assert torch.equal(levels, -levels.flip(0)) == how.get("symmetric", True)
    quantizes = {name: value for name, value in how.items() if name != "symmetric"}
    best, share = error(w, 3, levels, **quantizes), 0.99 if how.get("symmetric", True) else 0.4
    assert best < share * min(error(w, 3, get_codebook(name, 3), **quantizes) for name in ("nf", "bof"))


def test_tensors_count_by_their_weights_whatever_their_magnitude() -> None:
    """A small tensor of huge weights decides nothing; dtypes, experts and ends of rows may differ."""
    many, few = normal(256, 250).bfloat16(), torch.rand(2, 2, 40) * 1e6
    alone, both = kbit.fit_codebook(many, 3), kbit.fit_codebook(iter([many, few]), 3)
    assert (alone - both).abs().max() < 0.01
    assert torch.equal(both, kbit.fit_codebook([many, few], 3))


def test_blocks_are_drawn_from_all_columns() -> None:
    """Not from the first ones only, in rows of as many blocks as a sample leaves out."""
    w = normal(16384, 1024)
    w[:, :32] = w[:, :32].sign() * (1 + w[:, :32].abs() / 30)
    assert error(w, 4, kbit.fit_codebook(w, 4)) < 1.02 * error(w, 4, "bof")


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("most", [1, 7])
def test_weights_on_a_grid(bits: int, symmetric: bool, most: int) -> None:
    """Many are 0 exactly, for which a symmetric codebook has no level."""
    w = torch.randint(-most, most + 1, (256, 512), generator=torch.Generator().manual_seed(0)).float()
    levels = kbit.fit_codebook(w, bits, symmetric=symmetric)
    validate_codebook(levels, bits)
    assert error(w, bits, levels) < 1.001 * min(error(w, bits, name) for name in ("nf", "bof"))


@pytest.mark.parametrize("value", [0.0, 1.0, -3e-30])
def test_weights_that_are_all_one_number(value: float) -> None:
    levels = kbit.fit_codebook(torch.full((4, 64), value), 4)
    validate_codebook(levels, 4)


def test_what_cannot_be_fitted() -> None:
    for weights in (torch.randn(4, 31), torch.tensor(1.0), [], torch.randn(0, 64), torch.empty(4, 0)):
        with pytest.raises(ValueError, match="need a block of 32 in a row, got shapes"):
            kbit.fit_codebook(weights, 4)
    with pytest.raises(TypeError, match=r"float dtype, got torch\.int32"):
        kbit.fit_codebook(kbit.quantize(torch.randn(32, 64)).packed, 4)
    with pytest.raises(TypeError, match="a tensor on meta"):
        kbit.fit_codebook(torch.empty(4, 64, device="meta"), 4)
    with pytest.raises(kbit.NonFiniteWeightError, match="holds 32 NaN or Inf values"):
        kbit.fit_codebook([torch.randn(4, 64), torch.tensor([[torch.inf, torch.nan] * 16])], 4)
    with pytest.raises(ValueError, match="bits must be one of"):
        kbit.fit_codebook(torch.randn(4, 64), 6)


QUANTIZED = kbit.quantize(torch.randn(32, 64))
CODES = kbit.nvfp4.quantize_nvfp4(torch.randn(32, 64))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.randn(4, 64).numpy(), r"got ndarray\. Make one of it: torch\.as_tensor"),
        ([torch.randn(4, 64).numpy()], r"got ndarray\. Make one of it: torch\.as_tensor"),
        ([[1.0]], r"got list\. Make one"),
        (None, r"got NoneType\. Make one"),
        (QUANTIZED, r"got QuantizedTensor\. It is quantized already: kbit\.dequantize decodes"),
        ([torch.randn(4, 64), QUANTIZED], r"got QuantizedTensor\. It is quantized already: kbit\.dequantize"),
        ([CODES], r"got NVFP4Tensor\. It is quantized already: kbit\.nvfp4\.dequantize_nvfp4 decodes"),
        (torch.eye(64).to_sparse(), r"dense, got torch\.sparse_coo\. Use \.to_dense"),
        (torch.nested.nested_tensor([torch.ones(4, 64)]), r"dense, got a nested tensor\. Use \.to_padded"),
    ],
)
def test_weights_that_are_no_dense_tensors(weights: object, message: str) -> None:
    """In the words of `kbit.quantize`, which says the same of its weight."""
    with pytest.raises(TypeError, match=f"fit_codebook: weights must be .*{message}"):
        kbit.fit_codebook(weights, 4)


def test_options_are_those_of_quantize() -> None:
    """A format's name, not the dtype that it has; True or False, not what has a truth."""
    w = torch.randn(4, 64)
    for function in (kbit.fit_codebook, kbit.quantize):
        name = function.__name__
        with pytest.raises(ValueError, match=rf"format 'torch\.float16' \({name}\); known: e4m4, float"):
            function(w, 4, scale=torch.float16)
        with pytest.raises(TypeError, match=f"{name}: search must be True or False, got 'no'"):
            function(w, 4, search="no")
    with pytest.raises(TypeError, match="symmetric must be True or False, got 1"):
        kbit.fit_codebook(w, 4, symmetric=1)


def test_a_checkpoint_names_it(tmp_path) -> None:
    policy = kbit.KbitConfig(bits=4, overrides={"down": 5}, codebook="bof")
    assert policy.to_dict()["codebook"] == "bof"
    again = kbit.KbitConfig.from_dict(policy.to_dict())
    assert again.codebook_for(5).tolist() == kbit.block_optimal_float(5).tolist()


def test_levels_by_width_come_back_equal() -> None:
    levels = {3: kbit.block_optimal_float(3).tolist(), 4: kbit.normal_float(4)}
    policy = kbit.KbitConfig(bits=3, overrides={"down": 4}, codebook=levels)
    assert kbit.KbitConfig.from_dict(json.loads(json.dumps(policy.to_dict()))) == policy
