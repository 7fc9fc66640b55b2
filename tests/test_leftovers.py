"""What quantize_model says of large layers that it leaves alone for what they are called."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import kbit
from kbit.nn import KbitLinear, leftovers


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "LARGE", 64 * 64)


def said(model: nn.Module, policy: kbit.QuantizationPolicy | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kbit.quantize_model(model, policy or kbit.QuantizationPolicy())
    return [str(one.message) for one in caught]


def linear(out_features: int = 64) -> nn.Linear:
    return nn.Linear(64, out_features)


def test_layers_that_are_called_as_heads_and_routers_are() -> None:
    model = nn.ModuleDict({"decoder": nn.Sequential(linear(), linear()), "gate": linear(), "up": linear()})
    (words,) = said(model)
    assert words.startswith(
        "kbit left 3 large parameters unquantized: decoder.0.weight: taken for an embedding"
    )
    assert "overrides={'decoder.1': 4} quantizes it" in words
    assert "gate.weight: taken for a router by its name; overrides={'gate': 4}" in words
    assert said(model, kbit.QuantizationPolicy(overrides={"decoder": 4, "gate": 0})) == []
    assert isinstance(model["decoder"][1], KbitLinear)
    assert isinstance(model["gate"], nn.Linear)


def test_heads_and_routers_are_what_they_are_called() -> None:
    """As many rows as a table, the one name that no other layer has, experts beside a router."""
    table, experts = nn.Embedding(96, 64), nn.ModuleList([linear()])
    model = nn.ModuleDict({"wte": table, "decoder": linear(96), "lm_head": linear(70), "up": linear()})
    assert said(model) == []
    assert said(nn.ModuleDict({"gate": linear(), "experts": experts})) == []


def test_small_ones_are_not_mentioned() -> None:
    assert said(nn.ModuleDict({"decoder": linear(63), "up": linear()})) == []


def test_a_policy_that_was_changed_is_checked_again() -> None:
    policy = kbit.KbitConfig(bits=3)
    policy.bits = "4"
    with pytest.raises(ValueError, match="bits must be one of"):
        kbit.quantize_model(nn.ModuleDict({"up": linear()}), policy)


def test_an_id_beyond_the_vocabulary_is_told_with_its_sample() -> None:
    model = nn.Sequential(nn.Embedding(8, 64), linear())
    samples = [torch.tensor([[1]]), torch.tensor([[8]])]
    with pytest.raises(IndexError, match=r"calibration\[1\]: .*called with, of ids in its vocabulary\."):
        kbit.quantize_model(model, kbit.KbitConfig(), calibration=samples)


def test_an_nvfp4_config_is_for_loading() -> None:
    with pytest.raises(
        TypeError, match=r"got NVFP4Config\. A model gets NVFP4 layers on loading: from_pretrained"
    ):
        kbit.quantize_model(nn.ModuleDict({"up": linear()}), kbit.NVFP4Config())
