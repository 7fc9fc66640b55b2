"""`generate` looks late whether an answer has ended: for which caches, and with the same answers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers import StaticCache
from transformers.generation import utils

import kbit
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import attention, stop_checks
from tiny_models import build

GPU, CPU = torch.device("cuda"), torch.device("cpu")
IDS = torch.tensor([[3, 5, 7, 11, 13], [2, 4, 6, 8, 10]])


@pytest.fixture
def own_check(monkeypatch):
    """transformers' own check, whatever stood in for it before, and again afterwards."""
    own = utils.DeferredStopCheck.is_supported
    own = getattr(own, "__wrapped__", own)
    monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(own))


def supported(cache, device=GPU, returned=False, is_assistant=False):
    return utils.DeferredStopCheck.is_supported(device, cache, returned, is_assistant=is_assistant)


def static_cache():
    return StaticCache(config=build("llama", torch.float32, spread=False).config, max_cache_len=8)


def test_stops_of_known_caches_are_checked_late(own_check):
    ours, other = static_cache(), static_cache()
    assert not supported(ours)
    for _ in range(2):
        stop_checks.check_late(ours)
    assert supported(ours)
    assert not supported(other)
    assert not supported(None)
    assert not supported(ours, returned=True)
    assert not supported(ours, is_assistant=True)
    assert not supported(ours, CPU)
    assert supported(other, torch.device("mps"))  # as transformers says
    assert not hasattr(utils.DeferredStopCheck.is_supported.__wrapped__, "__wrapped__")


def test_caches_are_not_kept_alive(own_check):
    cache = static_cache()
    alive = weakref.ref(cache)
    stop_checks.check_late(cache)
    assert cache in stop_checks._caches
    del cache
    gc.collect()
    assert alive() is None


def test_a_transformers_without_late_checks_stays_as_it_is(monkeypatch):
    monkeypatch.delattr(utils, "DeferredStopCheck")
    cache = static_cache()
    stop_checks.check_late(cache)
    assert cache not in stop_checks._caches


class Streamed:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.mark.gpu
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_late_checks_give_the_same_answers(architecture, do_sample, monkeypatch):
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: False)  # the same attention for all steps
    model = kbit.quantize_model(build(architecture, torch.bfloat16, spread=False), QuantizationPolicy())
    model.to("cuda")

    def answer(batch, **more):
        ids = IDS[:batch].cuda()
        torch.manual_seed(1)
        more = {"do_sample": do_sample, "max_new_tokens": 24, "top_k": 0, "pad_token_id": 0} | more
        return model.generate(ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **more)

    one = answer(1, disable_compile=True)[0, IDS.shape[1] :].tolist()
    ends = [one[9], one[-1]]
    both = {batch: answer(batch, disable_compile=True, eos_token_id=ends) for batch in (1, 2)}
    assert both[1].shape[1] < IDS.shape[1] + 24
    made = []
    monkeypatch.setattr(utils, "DeferredStopCheck", counted(utils.DeferredStopCheck, made))
    kbit.enable_cuda_graphs(model)
    for _ in range(3):
        for batch, expected in both.items():
            assert torch.equal(answer(batch, eos_token_id=ends), expected)
        streamed = Streamed()
        answer(1, eos_token_id=ends, streamer=streamed)
        assert streamed.tokens == both[1][0].tolist()
        assert streamed.ended
        whole = answer(1, eos_token_id=ends, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(whole.sequences, both[1])
        assert len(whole.scores) == both[1].shape[1] - IDS.shape[1]
    assert len(made) == 9


def counted(check, made):
    """A check of transformers that notes each time that it is made."""

    class Counted(check):
        def __init__(self, *arguments, **named):
            made.append(arguments)
            super().__init__(*arguments, **named)

    return Counted
