"""Masks that steps make themselves are those that `generate` makes in front of them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import StaticCache
from transformers.masking_utils import create_masks_for_generate

import kbit
from kbit.integrations.transformers import late_masks
from kbit.integrations.transformers.cache_argument import cache_name, with_cache, without_cache
from tiny_models import build

LENGTH = 9
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def step(architecture="llama", mask=MASK, **config):
    """A model that leaves masks to its steps, and what `generate` gives to a step behind three tokens."""
    model = build(architecture, torch.float32, spread=False)
    for name, value in config.items():
        setattr(model.config, name, value)
    vars(model).update(late_masks.late_masks(model))
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    prompt = torch.tensor([[3, 5, 7], [2, 4, 6]])
    model(prompt, attention_mask=None if mask is None else mask[:, :3], **with_cache(cache))
    given = {
        cache_name(): cache,
        "attention_mask": mask,
        "position_ids": torch.tensor([[3], [1]]),
        "use_cache": True,
    }
    return model, cache, given


def prepared(model, given, **more):
    ids = torch.tensor([[3, 5, 7, 1], [2, 4, 6, 8]])
    return model.prepare_inputs_for_generation(ids, next_sequence_length=1, **given | more)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("mask", [MASK, torch.ones_like(MASK)], ids=["padded", "whole"])
def test_masks_of_steps_are_those_of_generate(architecture, mask):
    model, cache, given = step(architecture, mask)
    left = prepared(model, given)
    assert left["attention_mask"] is mask
    late = late_masks.with_late_mask(model, cache, without_cache(left))
    assert "attention_mask" not in late
    extended = next(value for value in late.values() if getattr(value, "shape", None) == (2, LENGTH))
    assert torch.equal(extended[:, :4], mask)
    assert not extended[:, 4:].any()
    made = late_masks.with_masks(model, cache, late)

    del model.create_masks_for_generate
    expected = prepared(model, given)
    assert made.keys() | {cache_name()} == expected.keys()
    for one, other in zip(masks_in(made), masks_in(expected), strict=True):
        assert one is other is None or torch.equal(one, other)


def masks_in(inputs):
    masks = inputs["attention_mask"]
    return [masks[name] for name in sorted(masks)] if isinstance(masks, dict) else [masks]


def test_steps_make_masks_where_nobody_gave_one():
    model, cache, given = step(mask=None)
    named = {"config": model.config, "inputs_embeds": torch.empty(2, 1, 0), "attention_mask": None}
    assert model.create_masks_for_generate(**with_cache(cache, named)) is None
    inputs = {"input_ids": torch.tensor([[1], [8]]), "position_ids": given["position_ids"]}
    made = late_masks.with_masks(model, cache, late_masks.with_late_mask(model, cache, inputs))
    expected = create_masks_for_generate(position_ids=given["position_ids"], **with_cache(cache, named))
    assert torch.equal(made["attention_mask"], expected)


@pytest.mark.parametrize(
    "named",
    [
        {"inputs_embeds": torch.empty(2, 2, 0)},
        {"is_first_iteration": True},
        {"token_type_ids": torch.zeros(2, 1)},
    ],
    ids=["tokens", "prompt", "types"],
)
def test_other_masks_are_made_in_front(named):
    model, cache, _ = step()
    named = {"inputs_embeds": torch.empty(2, 1, 0), "attention_mask": MASK, cache_name(): cache} | named
    assert model.create_masks_for_generate(config=model.config, **named).dim() == 4
    inputs = {"attention_mask": MASK}
    assert late_masks.with_late_mask(model, cache, inputs) is inputs


def test_only_attention_that_takes_masks_gets_them_late():
    model, _, given = step(_attn_implementation="eager")
    assert prepared(model, given)["attention_mask"].dim() == 4


def test_masks_that_nobody_left_stay():
    model, cache, given = step()
    prepared(model, given)
    other = {"attention_mask": MASK.clone()}
    assert late_masks.with_late_mask(model, cache, other) is other
    assert late_masks.with_masks(model, cache, other) is other


def test_a_mask_that_was_moved_is_the_one_that_was_left():
    model, _, given = step()
    left, masks = prepared(model, given)["attention_mask"], vars(model)[late_masks.MASKS]
    assert masks.left(left)
    assert masks.left(left.to("meta"))
    assert not masks.left(left.to("meta")[:, 1:])
    assert not masks.left(left.to("meta").float())
    assert not masks.left(None)


def test_models_with_masks_of_their_own_keep_them():
    class Own:
        @staticmethod
        def create_masks_for_generate(**named):
            """Not transformers'."""

    assert late_masks.late_masks(Own()) == {}


def test_copies_make_masks_in_front():
    model = build("llama", torch.float32, spread=False)
    kbit.enable_cuda_graphs(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.create_masks_for_generate is create_masks_for_generate
    kbit.disable_cuda_graphs(model)
    assert "create_masks_for_generate" not in vars(model)
