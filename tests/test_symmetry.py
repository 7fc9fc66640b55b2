"""What is known of codebooks that are symmetric around 0."""

from __future__ import annotations

import gc

import torch

import kbit
from codebooks import asymmetric
from kbit.format import symmetry
from kbit.format.symmetry import is_symmetric


def test_codebooks_of_32_levels_are_told_apart() -> None:
    assert is_symmetric(kbit.normal_float(5))
    assert not is_symmetric(asymmetric(5))
    nearly = kbit.normal_float(5)
    nearly[7] = torch.nextafter(nearly[7], torch.tensor(0.0))
    assert not is_symmetric(nearly)


def test_fewer_levels_need_no_answer() -> None:
    assert all(is_symmetric(asymmetric(bits)) for bits in (2, 3, 4))


def test_a_codebook_without_levels_is_none() -> None:
    assert not is_symmetric(torch.empty(32, device="meta"))


def test_an_answer_is_kept_until_the_levels_change() -> None:
    codebook = kbit.normal_float(5)
    assert is_symmetric(codebook)
    assert symmetry._known[id(codebook)][2]
    assert is_symmetric(codebook)
    codebook.copy_(asymmetric(5))
    assert not is_symmetric(codebook)
    with torch.inference_mode():
        assert is_symmetric(kbit.normal_float(5).clone())


def test_nothing_is_kept_of_a_codebook_that_is_gone() -> None:
    before = set(symmetry._known)
    for _ in range(50):
        is_symmetric(kbit.normal_float(5))
    gc.collect()
    assert set(symmetry._known) <= before
