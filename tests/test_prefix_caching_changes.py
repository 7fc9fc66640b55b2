"""What changes under prefix caching: tokens that a caller writes to, a model within a call, its config."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import kbit
from graph_tape import enable_on_cpu
from kbit.integrations.transformers.recordings import SharedPool
from test_next_steps import lively
from test_prefix_caching import answer, kept_of, tokens

IMPLEMENTATIONS = [None, "static"]


class Between(StoppingCriteria):
    """Calls something when a call has so many tokens."""

    def __init__(self, length, call):
        self.length, self.call = length, call

    def __call__(self, input_ids, scores, **named):
        if input_ids.shape[1] == self.length:
            self.call()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def criteria(*given):
    return StoppingCriteriaList([Between(*given)])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_callers_may_write_to_what_they_gave_and_got(implementation):
    model = lively("llama")
    kbit.enable_prefix_caching(model)
    how = {"cache_implementation": implementation}
    ids = answer(model, tokens(60), **how)
    ids[0, 30:40] = 9
    again = answer(model, ids, **how)
    prompt = tokens(60, seed=8)

    def stop():
        raise KeyError("stop")

    with pytest.raises(KeyError):
        answer(model, prompt, stopping_criteria=criteria(62, stop), **how)
    assert len(kept_of(model))
    prompt[0, 30:40] = 9
    last = answer(model, prompt, **how)
    kbit.disable_prefix_caching(model)
    assert torch.equal(again, answer(model, ids, **how))
    assert torch.equal(last, answer(model, prompt, **how))


@pytest.mark.parametrize("what", ["weight", "number"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_of_a_model_that_changed_midway_are_not_kept(implementation, what):
    model = lively("llama")
    kbit.enable_prefix_caching(model)
    how = {"cache_implementation": implementation}

    def change():
        if what == "number":
            model.model.layers[0].self_attn.scaling = 0.01
            return
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-1)

    ids = answer(model, tokens(60), stopping_criteria=criteria(63, change), **how)
    assert not len(kept_of(model))
    have = answer(model, ids, **how)
    assert len(kept_of(model)) == 1
    kbit.disable_prefix_caching(model)
    assert torch.equal(have, answer(model, ids, **how))


@pytest.mark.parametrize("same", [False, True])
def test_models_that_are_called_within_a_call_are_looked_at(same):
    """Their recorded steps do not hold any more when a number of theirs changes."""
    outer = lively("llama")
    kbit.enable_prefix_caching(outer)
    enable_on_cpu(outer)
    inner = outer if same else lively("llama")
    if not same:
        enable_on_cpu(inner)
    ids, found = torch.cat((tokens(9), tokens(9, seed=8))), []
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}

    def call():
        for scaling in (0.25, 1.0):
            for layer in inner.model.layers:
                layer.self_attn.scaling = scaling
            found.append(inner.generate(ids, cache_implementation="static", **how))

    for _ in range(2):
        answer(outer, tokens(60), cache_implementation="static", stopping_criteria=criteria(63, call))
    kbit.disable_prefix_caching(inner)
    kbit.disable_cuda_graphs(inner)
    for number, scaling in enumerate((0.25, 1.0)):
        for layer in inner.model.layers:
            layer.self_attn.scaling = scaling
        want = inner.generate(ids, **how)
        assert torch.equal(found[number], want)
        assert torch.equal(found[number + 2], want)


def test_a_cache_of_other_layers_is_left():
    model = lively("llama")
    kbit.enable_prefix_caching(model)
    ids = answer(model, tokens(60), cache_implementation="static")
    model.config.num_hidden_layers = 1  # and the model computes as many
    # The kept cache is too small for this one.
    have = answer(model, ids, cache_implementation="static", max_cache_len=3000)
    kbit.disable_prefix_caching(model)
    assert torch.equal(have, answer(model, ids))


def test_prompts_and_rests_take_turns_in_their_pool():
    """What a graph wrote there is copied before another one runs."""
    model, pool = lively("llama"), SharedPool()
    enable_on_cpu(model, pool)
    prompts = model.get_compiled_call(None).prompts
    assert prompts._recordings._lock is prompts._rests._recordings._lock is pool.lock
