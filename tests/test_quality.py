"""Quality on a real model that never was quantized: the scale search must beat plain absmax at every width.

The model is too large for the repository. KBIT_TEST_MODEL names the folder of a small unquantized causal
language model, KBIT_TEST_TEXT a text that it was not trained on.
"""

import copy
import math
import os
from pathlib import Path

import pytest
import torch

import kbit
from kbit.bench.quality import compare, compare_each, log_probabilities, windows
from kbit.cli.model_folder import load_model
from kbit.cli.texts import encode_windows, read_text
from kbit.format import SUPPORTED_BITS, QuantizationPolicy

needs_model = pytest.mark.skipif(
    not (os.environ.get("KBIT_TEST_MODEL") and os.environ.get("KBIT_TEST_TEXT")),
    reason="KBIT_TEST_MODEL and KBIT_TEST_TEXT name no unquantized model and held-out text",
)


class Bigram(torch.nn.Module):
    """A model whose next-token distribution is a table row, so that every score is known in closed form."""

    device = torch.device("cpu")

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, input_ids, use_cache):
        return type("Output", (), {"logits": self.table[input_ids]})


def test_scores_of_a_model_known_in_closed_form():
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    reference, model = Bigram(p.log().expand(3, 3)), Bigram(q.log().expand(3, 3))
    result = compare(model, torch.tensor([[0, 2, 2], [1, 2, 2]]), reference)
    assert result.tokens == 4
    assert result.perplexity == pytest.approx(2.0)
    assert result.kl_divergence == pytest.approx(float((p * (p / q).log()).sum()))
    assert compare(model, torch.tensor([[0, 2]])).kl_divergence is None


def test_tokens_that_the_reference_excludes_count_nothing():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.5, 0.25])
    ids = torch.tensor([[0, 1, 1]])
    result = compare(Bigram(q.log().expand(3, 3)), ids, Bigram(p.log().expand(3, 3)))
    assert result.kl_divergence == pytest.approx(0.5 * math.log(2))
    # What the reference does not exclude must not be excluded.
    assert compare(Bigram(p.log().expand(3, 3)), ids, Bigram(q.log().expand(3, 3))).kl_divergence == math.inf


def test_a_model_does_not_diverge_from_itself():
    model = Bigram(torch.randn(5, 5))
    ids = torch.randint(5, (3, 8))
    assert compare(model, ids, model).kl_divergence == pytest.approx(0.0, abs=1e-7)
    assert log_probabilities(model, ids).exp().sum(-1) == pytest.approx(torch.ones(3, 7))


def test_windows_are_whole_and_at_most_so_many_tokens():
    assert windows(torch.arange(10), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows(torch.arange(10), 4, max_tokens=5).shape == (1, 4)
    assert windows(torch.arange(3), 512).shape == (1, 3)
    with pytest.raises(ValueError, match="has 1 tokens"):
        windows(torch.arange(1))


def test_the_shipped_text_is_there():
    assert len(read_text(None)) > 30_000


def test_a_text_that_is_not_utf8_is_explained(tmp_path):
    file = tmp_path / "latin1.txt"
    file.write_bytes("caf\xe9".encode("latin1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        read_text(file)


@needs_model
@pytest.mark.slow
def test_search_beats_plain_absmax_at_every_width():
    folder = Path(os.environ["KBIT_TEST_MODEL"])
    ids = encode_windows(folder, Path(os.environ["KBIT_TEST_TEXT"]).read_text(), 256, 1024)
    base = load_model(folder, "float32")
    policies = [
        QuantizationPolicy(bits, search=search) for bits in SUPPORTED_BITS for search in (False, True)
    ]
    models = {(one.bits, one.search): kbit.quantize_model(copy.deepcopy(base), one) for one in policies}
    found = compare_each({"unquantized": base} | models, ids, base)
    divergences = {name: quality.kl_divergence for name, quality in found.items()}
    for bits in SUPPORTED_BITS:
        assert divergences[bits, True] < divergences[bits, False], bits
    searched = [divergences[bits, True] for bits in SUPPORTED_BITS]
    assert searched == sorted(searched, reverse=True), "each bit more must help"
    assert searched[-1] < 0.02
    assert math.isfinite(found["unquantized"].perplexity)
