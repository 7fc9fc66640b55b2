"""Prompts of `generate`, padded and recorded, give what transformers' own give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache, StaticCache

import kbit
from graph_tape import REFUSED, Recorder, enable_on_cpu
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import (
    cuda_graphs,
    last_caches,
    left_padding,
    preconditions,
    prompt_inputs,
    prompts,
    static_caches,
)
from kbit.integrations.transformers.cache_argument import cache_in, cache_name, with_cache
from kbit.integrations.transformers.static_caches import padded_length
from kbit.nn import gated_delta as layers
from static_steps import take_caches_of_a_cpu
from tiny_models import ARCHITECTURES, build

pytestmark = pytest.mark.usefixtures("small_heads")

TOKENS, ROOM = 6, 64
SETTINGS = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}


def quantized(architecture="llama", dtype=torch.float32):
    return kbit.quantize_model(build(architecture, dtype, spread=False), QuantizationPolicy(search=False))


def prompt(tokens, batch=1):
    return torch.randint(1, 30, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def answer(model, ids, mask=None, **more):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **SETTINGS | more)


def logits(model, ids, **more):
    """Of every token of the answer."""
    found = answer(model, ids, output_logits=True, return_dict_in_generate=True, **more)
    return torch.stack(found.logits)


class Enabled:
    """A model with graphs on a CPU, a cache for it, and what is recorded."""

    def __init__(self, model, record=None):
        self.recorder = record or Recorder()
        enable_on_cpu(model, self.recorder)
        self.model, self.cache = model, StaticCache(config=model.config, max_cache_len=ROOM)

    def logits(self, ids, **more):
        self.cache.reset()
        return logits(self.model, ids, **with_cache(self.cache), **more)

    @property
    def counts(self):
        return self.recorder.recorded, self.recorder.replayed


@given(tokens=st.integers(1, 10**6))
def test_prompts_are_padded_by_less_than_a_quarter(tokens):
    length = padded_length(tokens)
    assert tokens <= length < max(tokens + 16, tokens * 1.25)
    assert padded_length(length) == length <= padded_length(tokens + 1)
    assert length % 16 == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_prompts_give_what_the_model_gives(architecture):
    model = quantized(architecture)
    # Two lengths of padding; without any; fewer tokens than linear attention's convolution reaches.
    lengths = (21, 23, 32, 3, 16, 2, 21)
    own = [logits(model, prompt(tokens)) for tokens in lengths]
    enabled = Enabled(model)
    found = [enabled.logits(prompt(tokens)) for tokens in lengths]
    for mine, other in zip(found, own, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0], found[-1])  # run, and replayed
    assert enabled.counts == (2, 5)


def test_several_sequences_of_one_length():
    model = quantized("qwen3_next")
    own = [logits(model, prompt(20, batch)) for batch in (3, 1)]
    enabled = Enabled(model)
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(20, 3)), own[0], rtol=1e-4, atol=1e-5)
    assert enabled.counts == (1, 2)
    enabled.cache = StaticCache(config=model.config, max_cache_len=ROOM)
    torch.testing.assert_close(enabled.logits(prompt(20)), own[1], rtol=1e-4, atol=1e-5)
    assert enabled.counts == (1, 2)


def test_long_prompts_are_neither_padded_nor_recorded(monkeypatch):
    monkeypatch.setattr(static_caches, "MOST_TOKENS", 31)
    model = quantized("qwen3_next")
    own = logits(model, prompt(20))
    enabled, ran = Enabled(model), []
    run = model.model.embed_tokens.register_forward_hook(lambda *given: ran.append(given[1][0].shape[1]))
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)
    run.remove()
    assert ran[0] == 20
    assert enabled.counts == (0, 0)


def test_a_cache_without_room_for_padding():
    model = quantized()
    own = logits(model, prompt(18))
    enabled = Enabled(model)
    enabled.cache = StaticCache(config=model.config, max_cache_len=18 + TOKENS)
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(18)), own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next"])
def test_prompts_that_a_cache_has_no_room_for_are_refused(architecture, monkeypatch):
    """Transformers' own update fails there, but kernels leave out what is beyond."""
    take_caches_of_a_cpu(monkeypatch)
    model = quantized(architecture)
    own = answer(model, prompt(20))
    enabled = Enabled(model)
    with pytest.raises(
        ValueError, match="^generate: 65 tokens are to be in a cache .* room for 64, .*=65 or"
    ):
        enabled.logits(prompt(ROOM + 1))  # of a new cache
    for _ in range(3):
        enabled.cache.reset()
        held = answer(model, prompt(20), **with_cache(enabled.cache))
        assert torch.equal(held, own)
        more = torch.cat((held, prompt(ROOM)), 1)
        with pytest.raises(ValueError, match=f"{20 + TOKENS + ROOM} tokens .* room for {ROOM}"):
            answer(model, more, **with_cache(enabled.cache))  # which holds its beginning
        assert int(enabled.cache.get_seq_length()) == 20 + TOKENS - 1
        with pytest.raises(ValueError, match=f"{ROOM + 1} tokens .* room for {ROOM}"):
            enabled.logits(prompt(ROOM + 1))
    more = {"max_new_tokens": 1, "min_new_tokens": 1}
    assert len(enabled.logits(prompt(ROOM), **more)) == 1


def test_caches_of_generate_have_room_for_padding(monkeypatch):
    model = quantized()
    own = answer(model, prompt(18))
    enabled = Enabled(model)
    for _ in range(3):
        assert torch.equal(answer(model, prompt(18), cache_implementation="static"), own)
    assert enabled.counts == (1, 2)
    monkeypatch.setattr(static_caches, "MOST_TOKENS", 40)
    named = {"max_cache_len": 33, "batch_size": 1, "model_kwargs": {"attention_mask": torch.ones(1, 33)}}
    assert not last_caches._room_for_padding(named)
    assert not last_caches._room_for_padding(named | {"model_kwargs": {}})


def test_latents_behind_a_prompt_are_not_expanded():
    model = quantized("glm4_moe_lite")
    enabled, rows = Enabled(model), []
    expand = model.model.layers[0].self_attn.kv_b_proj

    def look(layer, given):
        rows.append(given[0].shape[-2])

    look.__module__ = "torch"  # or prompts would be the model's own affair
    hook = expand.register_forward_pre_hook(look)
    enabled.logits(prompt(20), max_new_tokens=1, min_new_tokens=1)
    hook.remove()
    assert rows == [32]


def steered(layer, given, output):
    return torch.cat([output[:, :-1], output[:, -1:] + 1], 1)


def masks(*padding, tokens=20):
    """For sequences with so many tokens of padding in front."""
    return (torch.arange(tokens) >= torch.tensor(padding)[:, None]).long()


@pytest.mark.filterwarnings("ignore::kbit.CUDAGraphWarning")
@pytest.mark.parametrize("kind", ["hook", "forward", "everywhere"])
def test_hooks_see_prompts_as_they_are(kind, request):
    """One that counts from a prompt's end, or over all its tokens, finds no padding there."""
    model = quantized("llama")
    layer = model.model.layers[0]
    if kind == "hook":
        layer.register_forward_hook(steered)
    elif kind == "forward":
        own = layer.forward
        layer.forward = lambda *given, **named: steered(layer, given, own(*given, **named))
    else:
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda module, given, output: steered(module, given, output) if module is layer else None
        )
        request.addfinalizer(hook.remove)
    given = [(prompt(20, 2), None), (prompt(20, 2), masks(0, 7))]
    expected = [logits(model, ids, mask=mask) for ids, mask in given]
    enabled = Enabled(model)
    for _ in range(3):
        for (ids, mask), want in zip(given, expected, strict=True):
            torch.testing.assert_close(enabled.logits(ids, mask=mask), want, rtol=1e-4, atol=1e-5)
    assert not any(enabled.counts)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompts_of_several_lengths(architecture):
    model = quantized(architecture)
    # Of other lengths, and other widths that are padded to the same one; fewer tokens than a convolution's.
    given = [masks(3, 0, 18), masks(0, 19, 5), masks(1, 2, 3, tokens=23), masks(7, 7, 7, tokens=31)]
    own = [logits(model, prompt(mask.shape[1], 3), mask=mask) for mask in given]
    enabled = Enabled(model)
    for _ in range(2):
        for mask, want in zip(given, own, strict=True):
            found = enabled.logits(prompt(mask.shape[1], 3), mask=mask)
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (1, 7)


def test_prompts_of_several_lengths_that_are_too_long_to_record(monkeypatch):
    monkeypatch.setattr(static_caches, "MOST_TOKENS", 31)
    model, mask = quantized("qwen3_next"), masks(3, 0)
    own = logits(model, prompt(20, 2), mask=mask)
    enabled = Enabled(model)
    torch.testing.assert_close(enabled.logits(prompt(20, 2), mask=mask), own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)


@pytest.mark.parametrize("kept", [0, 3])
def test_logits_of_prompts_of_several_lengths(kept):
    model, mask = quantized(), masks(3, 0)
    there = mask.bool()[:, -kept:]
    named = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        own = model(prompt(20, 2), logits_to_keep=kept, **named).logits
    enabled = Enabled(model)
    enabled.cache.early_initialization(2, 1, 16, torch.float32, "cpu")
    steps = vars(model)[cuda_graphs._PromptsOfModels.name].__func__._steps.of(model)
    named |= {cache_name(): enabled.cache, "logits_to_keep": kept}
    with torch.no_grad():
        for _ in range(3):
            enabled.cache.reset()
            found = steps.prompts(prompt(20, 2), named).logits
            assert found.shape == own.shape
            torch.testing.assert_close(found[there], own[there], rtol=1e-4, atol=1e-5)
    assert enabled.counts == (1, 2)


def test_other_padding_is_transformers_own_affair():
    model = quantized()
    hole, behind = masks(0, 0), masks(2, 0).flip(1)
    hole[0, 3:5] = 0
    for mask in (hole, behind):
        own = answer(model, prompt(20, 2), mask)
        enabled = Enabled(model)
        for _ in range(3):
            enabled.cache.reset()
            assert torch.equal(answer(model, prompt(20, 2), mask, **with_cache(enabled.cache)), own)
        assert enabled.counts == (0, 0)


def test_heads_that_read_hidden_states_twice_get_masks(monkeypatch):
    model, mask = quantized(), masks(3, 0)
    own = logits(model, prompt(20, 2), mask=mask)
    forward = type(model.model).forward

    def twice(self, *given, **named):
        found = forward(self, *given, **named)
        for hook in self._forward_hooks.values():
            hook(self, given, found)
        return found

    monkeypatch.setattr(type(model.model), "forward", twice)
    enabled = Enabled(model)
    for _ in range(2):
        found = enabled.logits(prompt(20, 2), mask=mask)
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)
    assert not model.model._forward_hooks
    monkeypatch.undo()
    for _ in range(3):  # without padding it is as ever
        enabled.logits(prompt(20, 2))
    assert enabled.counts == (1, 2)


def test_masks_may_be_elsewhere_than_the_model():
    inputs = {"input_ids": torch.ones(2, 5, device="meta"), "position_ids": torch.ones(2, 5, device="meta")}
    padded = prompt_inputs.padded(inputs, torch.tensor([1, 0]), 16)
    assert {value.device.type for value in padded.values()} == {"meta"}


def test_hidden_states_of_other_threads_stay_where_they_are():
    model, ids = quantized(), prompt(12)

    def read():
        with torch.no_grad():
            return model(ids).logits

    own = read()
    with left_padding.states_moved_right(model, torch.tensor([3])), ThreadPoolExecutor() as pool:
        assert torch.equal(pool.submit(read).result(), own)
        assert torch.equal(read()[:, 3:], own[:, :-3])
        assert not preconditions.hooks_of(model.base_model)


def test_a_conversation_goes_on_behind_its_first_prompt():
    model = quantized("qwen3_next")
    first, more = prompt(20), prompt(9)
    enabled = Enabled(model)

    def talk(cache):
        seen = torch.cat((answer(model, first, **with_cache(cache)), more), 1)
        return answer(model, seen, **with_cache(cache))

    own = talk(DynamicCache(config=model.config))
    for _ in range(3):
        enabled.cache.reset()
        assert torch.equal(talk(enabled.cache), own)
    assert enabled.counts == (2, 3)  # of the first prompt, and of what is behind it


@pytest.mark.parametrize("kept", [0, 3, 40])
def test_logits_of_other_tokens(kept):
    model = quantized()
    own = logits(model, prompt(20))
    enabled = Enabled(model)
    for _ in range(3):
        found = enabled.logits(prompt(20), logits_to_keep=kept)
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (1, 2)


def test_models_whose_layers_do_other_things_run_their_own_way(monkeypatch):
    model = quantized("qwen3_next")
    own = logits(model, prompt(20))
    monkeypatch.setattr(layers, "is_on_gpu", lambda x: False)  # linear attention by its class
    enabled = Enabled(model)
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)
    model = quantized()
    model.model.layers[1].self_attn.is_causal = False
    enabled = Enabled(model)
    own = logits(model, prompt(20), **with_cache(enabled.cache), disable_compile=True)
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)


@pytest.mark.parametrize("asked", [{"output_hidden_states": True}, {"prefill_chunk_size": 8}], ids=str)
def test_what_is_asked_for_besides_is_left_to_transformers(asked):
    model = quantized()
    own = logits(model, prompt(20))
    enabled = Enabled(model)
    for _ in range(3):
        torch.testing.assert_close(enabled.logits(prompt(20), **asked), own, rtol=1e-4, atol=1e-5)
    assert enabled.counts == (0, 0)


def test_beams_record_nothing_that_they_could_not_replay():
    model = quantized()
    want = answer(model, prompt(20), num_beams=3)
    enabled = Enabled(model)
    for _ in range(4):
        found = answer(model, prompt(20), num_beams=3, cache_implementation="static")
        assert torch.equal(found, want)
    assert enabled.counts == (0, 0)


def test_arguments_that_say_nothing():
    model = quantized()
    enabled = Enabled(model)
    given = {cache_name(): enabled.cache, "attention_mask": None}
    enabled.cache.early_initialization(1, 1, 16, torch.float32, "cpu")
    assert prompts._may_take(model, prompt(20), given | {"mm_encoder_outputs": {}, "pixel_values": None})
    assert not prompts._may_take(model, prompt(20), given | {"mm_encoder_outputs": {"image": 1}})


def test_prompts_that_cannot_be_recorded_run_all_the_same():
    def refuse(run, device):
        raise RuntimeError(f"{REFUSED}\nand more")

    model = quantized()
    own = logits(model, prompt(20))
    enabled = Enabled(model, refuse)
    torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match=f"^prompts of LlamaForCausalLM.*{REFUSED}.$"):
        torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(enabled.logits(prompt(20)), own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "glm4_moe_lite"])
def test_other_threads_are_left_alone(architecture):
    """A prompt of the same model, in a cache of its own, and what follows it."""
    model, ids = quantized(architecture), prompt(12)

    def read():
        cache = StaticCache(config=model.config, max_cache_len=ROOM)
        with torch.no_grad():
            return [model(part, **with_cache(cache)).logits for part in ids.split([5, 4, 1, 2], 1)]

    own = read()
    with prompts.prompt_kernels(model), ThreadPoolExecutor() as pool:
        for mine, other in zip(pool.submit(read).result(), own, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_undone_the_model_has_its_own_method():
    model = quantized()
    kbit.enable_cuda_graphs(model)
    assert "_prefill" in vars(model)
    kbit.disable_cuda_graphs(model)
    assert "_prefill" not in vars(model)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_of_prompts(architecture, monkeypatch):
    monkeypatch.undo()  # heads of 16 are not the kernel's
    model = quantized(architecture, torch.bfloat16).cuda()
    config = {cache_name(): StaticCache(config=model.config, max_cache_len=ROOM)}
    lengths = (21, 32, 3, 40)
    own = [
        logits(model, prompt(tokens), cache_implementation="static", disable_compile=True)
        for tokens in lengths
    ]
    kbit.enable_cuda_graphs(model)
    first = []
    for times in range(20):
        for at, tokens in enumerate(lengths):
            cache_in(config).reset()
            found = logits(model, prompt(tokens), **config)
            if not times:
                first.append(found)
                torch.testing.assert_close(found, own[at], rtol=3e-2, atol=2e-2)
            assert torch.equal(found, first[at])


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_of_prompts_of_several_lengths(architecture, monkeypatch):
    monkeypatch.undo()
    model, ids = quantized(architecture, torch.bfloat16).cuda(), prompt(20, 3)
    config = {cache_name(): StaticCache(config=model.config, max_cache_len=ROOM)}
    given = [masks(3, 0, 18), masks(0, 19, 5)]
    eager = {"cache_implementation": "static", "disable_compile": True}
    own = [logits(model, ids, mask=mask, **eager) for mask in given]
    kbit.enable_cuda_graphs(model)
    first = []
    for times in range(20):
        for at, mask in enumerate(given):
            cache_in(config).reset()
            found = logits(model, ids, mask=mask, **config)
            if not times:
                first.append(found)
                torch.testing.assert_close(found, own[at], rtol=3e-2, atol=2e-2)
            assert torch.equal(found, first[at])
