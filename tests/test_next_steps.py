"""Steps that follow each other give the tokens of steps that are prepared one by one."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import sys
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kbit
from graph_tape import enable_on_cpu
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import next_steps, static_caches
from kbit.integrations.transformers.cache_argument import cache_name, with_cache
from kbit.integrations.transformers.recordings import Following
from static_steps import take_caches_of_a_cpu
from tiny_models import build

IDS = torch.arange(2, 14).view(2, 6)
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def lively(architecture):
    """A model whose tokens depend on positions and masks; those of small weights repeat one token."""
    model = build(architecture, torch.float32, spread=False)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                size = 1.0 if "embed" in name else 0.25
                parameter.copy_(size * torch.randn(parameter.shape, generator=drawn))
    return model


@pytest.fixture
def followed(monkeypatch):
    """The tokens that recordings got alone."""
    seen = []
    own = Following.__call__
    monkeypatch.setattr(Following, "__call__", lambda *given: seen.append(given[1].clone()) or own(*given))
    return seen


def generated(model, **more):
    settings = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "attention_mask": PADDED}
    torch.manual_seed(3)
    return model.generate(IDS, **(settings | more))


class Noted:
    """A streamer."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens.append(value.tolist())

    def end(self):
        self.tokens.append("end")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_mask": torch.ones_like(IDS)},
        {"do_sample": True, "temperature": 2.0, "top_k": 10},
        {"repetition_penalty": 1.3, "min_new_tokens": 14},
        {"eos_token_id": 5},
        {"use_cache": True, "logits_to_keep": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next"])
def test_tokens_are_those_of_steps_one_by_one(architecture, more, followed):
    model = lively(architecture)
    want = generated(model, **more)
    enable_on_cpu(model)
    for _ in range(2):
        assert torch.equal(generated(model, cache_implementation="static", **more), want)
    assert followed
    assert torch.equal(followed[-1], want[:, -2:-1]) or more.get("eos_token_id")


def test_streamers_and_one_sequence(followed):
    model = lively("llama")
    found = []
    for static in ({}, {"cache_implementation": "static"}):
        streamer = Noted()
        model.generate(
            IDS[:1], max_new_tokens=12, do_sample=False, pad_token_id=0, streamer=streamer, **static
        )
        found.append(streamer.tokens)
        enable_on_cpu(model)
    assert found[0] == found[1]
    assert followed


@pytest.mark.parametrize("times", [1, 3])
def test_a_loop_goes_on_where_a_recording_does_not_hold(times, followed, monkeypatch):
    """What masks and positions lack is made up for, and steps follow again behind the next recording."""
    model = lively("llama")
    want = generated(model)
    enable_on_cpu(model)
    asked = []
    own = Following.holds
    monkeypatch.setattr(
        Following, "holds", lambda *given: asked.append(0) or (own(*given) and len(asked) % 5 >= times)
    )
    masks = []
    of_class = GenerationMixin.prepare_inputs_for_generation

    def prepare(self, input_ids, **named):
        if named["next_sequence_length"] == 1:
            sizes = (named[name].shape[1] for name in ("attention_mask", "position_ids"))
            masks.append((input_ids.shape[1], *sizes))
        return of_class(self, input_ids, **named)

    monkeypatch.setattr(type(model), "prepare_inputs_for_generation", prepare)
    for _ in range(2):
        assert torch.equal(generated(model, cache_implementation="static"), want)
    assert 4 < len(followed) < 24
    assert all(ids == mask == positions for ids, mask, positions in masks)


def test_a_loop_keeps_no_cache_alive(followed):
    model = lively("llama")
    enable_on_cpu(model)
    cache = StaticCache(model.config, 32)
    generated(model, **with_cache(cache))
    assert followed
    keys, cache = weakref.ref(cache.layers[0].keys), None
    gc.collect()
    assert keys() is None


@pytest.fixture
def small(monkeypatch):
    """Makes a model with graphs, and a cache of a CPU that counts as a GPU's."""
    take_caches_of_a_cpu(monkeypatch)

    def make(room):
        model = lively("llama")
        enable_on_cpu(model)
        return model, StaticCache(model.config, room)

    return make


@pytest.mark.parametrize("room", [6, 7, 8, 9, 12, 18])  # steps in front of recordings, recorded, and behind
def test_answers_that_a_cache_has_no_room_for_are_refused(room, small):
    """Kernels leave out what is beyond, and tokens would be others."""
    model, cache = small(room)
    fits = {cache_name(): cache, "max_new_tokens": room - 5}
    want = generated(lively("llama"), max_new_tokens=room - 5)
    for _ in range(3):
        assert torch.equal(generated(model, **fits), want)
        cache.reset()
        refusal = rf"^generate: {room + 1} tokens .* room for {room}, {cache_name()}"
        with pytest.raises(ValueError, match=refusal):
            generated(model, **with_cache(cache))
        assert int(cache.get_seq_length()) == room
        cache.reset()


def test_answers_that_end_in_time_need_no_more_room(small, followed):
    model, cache = small(12)
    want = generated(lively("llama"), max_new_tokens=7)
    for _ in range(3):
        cache.reset()
        ends = StoppingCriteriaList([Ending(len(want[0]))])
        assert torch.equal(generated(model, **with_cache(cache), stopping_criteria=ends), want)
    assert followed


class Ending(StoppingCriteria):
    """At a length."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **named):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("mask", [PADDED, torch.ones_like(PADDED)], ids=["padded", "whole"])
@pytest.mark.parametrize("kind", ["late masks", "made masks", "embeddings"])
def test_what_tells_how_many_tokens_a_cache_is_to_hold(kind, mask, small):
    """generate leaves out a mask of ones; of embeddings, ids have none."""
    model, cache = small(12)
    if kind == "made masks":  # of four dimensions, as of models with masks of their own
        del model.create_masks_for_generate
    given = {"inputs_embeds": model.get_input_embeddings()(IDS)} if kind == "embeddings" else {"inputs": IDS}
    given |= {"attention_mask": mask, cache_name(): cache}
    for _ in range(3):
        cache.reset()
        with pytest.raises(ValueError, match="^generate: 13 tokens .* room for 12"), torch.no_grad():
            model.generate(**given, max_new_tokens=14, do_sample=False, pad_token_id=0)


def test_masks_tell_it_where_a_model_has_methods_of_its_own(small, monkeypatch):
    monkeypatch.setattr(next_steps, "methods", lambda *_: [])
    model, cache = small(12)
    for _ in range(3):
        cache.reset()
        with pytest.raises(ValueError, match="^generate: 13 tokens .* room for 12"):
            generated(model, **with_cache(cache))


def test_rooms_are_looked_up_once_for_a_cache(small, followed, monkeypatch):
    asked, own = [], static_caches.room_of
    monkeypatch.setattr(static_caches, "room_of", lambda cache: asked.append(0) or own(cache))
    model, cache = small(24)
    for _ in range(3):
        cache.reset()
        generated(model, **with_cache(cache))
    assert followed
    assert len(asked) == 1


def test_other_loops_get_whole_masks(followed):
    """Such as one that changes them, or takes a step by the model itself."""
    model = lively("llama")
    want = generated(model)

    def loop():
        cache = StaticCache(model.config, 32)
        named = {"attention_mask": PADDED, cache_name(): cache, "use_cache": True}
        call, ids, length = model.get_compiled_call(None), IDS, None
        for number in range(14):
            inputs = model.prepare_inputs_for_generation(ids, next_sequence_length=length, **named)
            outputs = (model if number in (0, 9) else call)(**inputs, return_dict=True)
            named = model._update_model_kwargs_for_generation(outputs, named)
            named["attention_mask"] = named["attention_mask"].clone()
            ids, length = torch.cat((ids, outputs.logits[:, -1:].argmax(-1)), 1), 1
        return ids

    enable_on_cpu(model)
    for _ in range(2):
        assert torch.equal(loop(), want)
    assert not followed
    assert torch.equal(generated(model, cache_implementation="static"), want)
    assert followed


def test_others_get_whole_masks_in_the_middle_of_a_loop(followed):
    """More than a token is prepared, or was computed, with arguments that lack some steps."""
    model = lively("llama")
    enable_on_cpu(model)

    def ask():
        frame = sys._getframe()
        while frame.f_code is not GenerationMixin._sample.__code__:
            frame = frame.f_back
        ids, named = frame.f_locals["input_ids"], frame.f_locals["model_kwargs"]
        assert named["attention_mask"].shape[1] < ids.shape[1]
        several = model.prepare_inputs_for_generation(ids, next_sequence_length=2, **named)
        assert several["position_ids"].shape == (2, 2)
        assert several["position_ids"][1].tolist() == [ids.shape[1] - 2, ids.shape[1] - 1]
        named = model._update_model_kwargs_for_generation({}, named, num_new_tokens=3)
        assert named["attention_mask"].shape[1] == ids.shape[1] + 3
        assert named["position_ids"][1].tolist() == list(range(ids.shape[1] + 3))
        asked.append(True)

    asked = []
    criteria = StoppingCriteriaList([Calling(ask)])
    generated(model, cache_implementation="static", stopping_criteria=criteria)
    assert asked
    assert followed


class Calling(StoppingCriteria):
    """Calls something once, between two steps."""

    def __init__(self, call):
        self.call = call

    def __call__(self, input_ids, scores, **named):
        if input_ids.shape[1] == 15:
            self.call()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("inner", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_calls_between_two_steps(inner, followed):
    """Of the same model's `generate`, and of what enables graphs."""
    model = lively("llama")
    want = generated(model)
    enable_on_cpu(model)

    def call():
        model.generate(IDS[:1, 2:], max_new_tokens=14, do_sample=False, pad_token_id=0, **inner)

    for between in (call, call, lambda: kbit.enable_cuda_graphs(model)):
        criteria = StoppingCriteriaList([Calling(between)])
        found = generated(model, cache_implementation="static", stopping_criteria=criteria)
        assert torch.equal(found, want)
    assert followed


def test_a_recording_that_goes_between_question_and_step(followed, monkeypatch):
    model = lively("llama")
    want = generated(model)
    enable_on_cpu(model)
    recordings = model.get_compiled_call(None)._recordings
    own = Following.__call__
    monkeypatch.setattr(Following, "__call__", lambda *given: (recordings.clear(), own(*given))[1])
    assert torch.equal(generated(model, cache_implementation="static"), want)
    assert followed


def test_layers_of_a_cache_that_were_replaced_are_others(followed):
    model = lively("llama")
    enable_on_cpu(model)
    cache = StaticCache(model.config, 48)
    first = generated(model, **with_cache(cache))
    cache.reset()
    kept = copy.deepcopy(cache.layers)
    assert torch.equal(generated(model, **with_cache(cache)), first)
    cache.layers = kept
    assert torch.equal(generated(model, **with_cache(cache)), first)


def test_two_threads_have_loops_of_their_own(followed):
    model = lively("llama")
    prompts = [IDS[:, :4], IDS[:, 1:]]
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    want = [model.generate(ids, **settings) for ids in prompts]
    enable_on_cpu(model)
    wrong = []

    def run(ids, expected):
        for _ in range(3):
            if not torch.equal(model.generate(ids, cache_implementation="static", **settings), expected):
                wrong.append(ids)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(prompts, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_processors_that_look_at_ids_see_all_of_them(followed):
    seen = []

    class Look(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(input_ids.shape[1])
            return scores

    model = lively("llama")
    enable_on_cpu(model)
    generated(model, cache_implementation="static", logits_processor=LogitsProcessorList([Look()]))
    assert seen == list(range(6, 20))


def test_arguments_are_checked_as_before():
    model = lively("llama")
    kbit.enable_cuda_graphs(model)
    with pytest.raises(ValueError, match="no_such_argument"):
        generated(model, no_such_argument=1)


def test_models_with_methods_of_their_own_keep_them(monkeypatch):
    model = lively("llama")
    own = type(model)._update_model_kwargs_for_generation
    monkeypatch.setattr(
        type(model), "_update_model_kwargs_for_generation", lambda *given, **named: own(*given, **named)
    )
    kbit.enable_cuda_graphs(model)
    assert not {*next_steps.NAMES} & {*vars(model)}


def test_models_of_peft(followed):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(lively("llama"), adapter)
    want = generated(model.eval())
    enable_on_cpu(model.get_base_model())
    for _ in range(2):
        assert torch.equal(generated(model, cache_implementation="static"), want)
    assert followed


@pytest.mark.parametrize("name", next_steps.NAMES)
@pytest.mark.parametrize("behind", [False, True])
def test_methods_that_a_user_put_there_stay(name, behind, followed):
    model = lively("llama")
    want, called = generated(model), []
    if behind:
        enable_on_cpu(model)
    before = getattr(model, name)

    @functools.wraps(before)
    def own(*given, **named):
        called.append(name)
        return before(*given, **named)

    setattr(model, name, own)
    if not behind:
        enable_on_cpu(model)
    assert torch.equal(generated(model, cache_implementation="static"), want)
    assert len(called) >= 13
    assert not followed
    kbit.disable_cuda_graphs(model)
    assert getattr(model, name) is own


def test_other_methods_of_a_user_are_refused_and_left():
    model = lively("llama")
    for name, enable, disable in (
        ("generate", kbit.enable_prefix_caching, kbit.disable_prefix_caching),
        ("_prefill", kbit.enable_cuda_graphs, kbit.disable_cuda_graphs),
    ):
        setattr(model, name, own := functools.partial(print))
        with pytest.raises(
            TypeError, match=f"{enable.__name__}: this Llama.* has its own {name}.* Take it away"
        ):
            enable(model)
        disable(model)
        assert getattr(model, name) is own


def test_copies_and_disabled_models(followed):
    model = lively("llama")
    want = generated(model)
    enable_on_cpu(model)
    assert {*next_steps.NAMES} <= {*vars(model)}
    assert torch.equal(generated(copy.deepcopy(model)), want)
    assert torch.equal(generated(pickle.loads(pickle.dumps(model))), want)
    kbit.disable_cuda_graphs(model)
    assert not {*next_steps.NAMES} & {*vars(model)}
    assert torch.equal(generated(model), want)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_on_a_gpu(architecture, batch, followed):
    model = build(architecture, torch.bfloat16, spread=False).eval()
    model = kbit.quantize_model(model, QuantizationPolicy(search=False)).cuda()
    kbit.enable_cuda_graphs(model)
    settings = {"max_new_tokens": 60, "pad_token_id": 0, "cache_implementation": "static"}
    given = {"attention_mask": PADDED[:batch].cuda(), "do_sample": False, **settings}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Following, "holds", lambda *given: False)
        want = [model.generate(IDS[:batch].cuda(), **given) for _ in range(2)][1]
    assert not followed
    for _ in range(20):
        assert torch.equal(model.generate(IDS[:batch].cuda(), **given), want)
    assert len(followed) > 20 * 50
