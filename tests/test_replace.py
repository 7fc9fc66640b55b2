"""quantize_model: what it leaves alone and says about it, and what a replaced layer keeps."""

import pytest
import torch
from torch import nn

import kbit
from kbit.nn import KbitLinear, quantize_model


@pytest.mark.parametrize("tied_to", ["skipped", "unsupported"])
def test_the_reason_names_who_holds_a_tied_weight(tied_to):
    class Scaled(nn.Embedding):
        pass

    table = (nn.Embedding if tied_to == "skipped" else Scaled)(1000, 1000)
    model = nn.ModuleDict({"embed_tokens": table, "lm_head": nn.Linear(1000, 1000)})
    model.lm_head.weight = model.embed_tokens.weight
    policy = kbit.QuantizationPolicy(embedding_bits=4, overrides={"embed_tokens": 4 * (tied_to != "skipped")})
    told = {"skipped": "the policy leaves it out", "unsupported": "Scaled is not nn.Linear"}[tied_to]
    with pytest.warns(UserWarning, match=f"lm_head.weight: it shares its weight with embed_tokens: {told}"):
        quantize_model(model, policy)


def test_layers_of_which_torch_reads_the_weight_stay():
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoder(block, 2)).eval()
    quantize_model(model, kbit.QuantizationPolicy())
    assert [n for n, m in model.named_modules() if isinstance(m, KbitLinear)] == ["0"]
    with torch.no_grad():
        assert model(torch.randn(2, 5, 32)).isfinite().all()
