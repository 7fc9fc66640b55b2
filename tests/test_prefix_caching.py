"""Prefix caching gives what whole prompts give, computes what is new, and forgets what does not hold."""

from __future__ import annotations

import copy
import functools
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    StoppingCriteriaList,
)

import kbit
from graph_tape import Recorder, enable_on_cpu
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import attention, prompt_rests, static_caches
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.integrations.transformers.kept_caches import Conversations, Kept, length_of, lent
from tiny_models import ARCHITECTURES, build

NEW, FIRST = 8, 40


def model_of(architecture="llama"):
    model = build(architecture, torch.float32, spread=False)
    return kbit.quantize_model(model, QuantizationPolicy(search=False))


def tokens(count, seed=7):
    return torch.randint(1, 30, (1, count), generator=torch.Generator().manual_seed(seed))


def answer(model, ids, **more):
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    ids = ids.to(model.device)
    found = model.generate(ids, **({"attention_mask": torch.ones_like(ids)} | settings | more))
    return found.cpu() if isinstance(found, torch.Tensor) else found


def chat(model, turns=4, **more):
    """Prompts and answers, as one sequence after every turn."""
    ids, found = tokens(FIRST), []
    for turn in range(turns):
        found.append(answer(model, ids, **more))
        ids = torch.cat((found[-1], torch.tensor([[5, 6, 7, 8 + turn]])), 1)
    return found


def logits_of(model, ids, **more):
    """Of every token of the answer, and the answer."""
    found = []
    ids = answer(
        model, ids, logits_processor=LogitsProcessorList([lambda _, x: found.append(x.clone()) or x]), **more
    )
    return torch.stack(found), ids


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each call of a model computed, one token each left out; no hook, which would be one."""

    def count(model):
        counts, own = [], type(model).forward

        @functools.wraps(own)
        def forward(self, *given, **named):
            if self is model and named["input_ids"].shape[1] > 1:
                counts.append(named["input_ids"].shape[1])
            return own(self, *given, **named)

        monkeypatch.setattr(type(model), "forward", forward)
        return counts

    return count


SOME = ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite"]


def kept_of(model):
    return model.generate.__func__.of(model)


@pytest.mark.parametrize(
    ("architecture", "implementation"),
    [*((name, None) for name in ARCHITECTURES), *((name, "static") for name in SOME)],
)
def test_a_chat_gets_the_same_answers(architecture, implementation, computed):
    model = model_of(architecture)
    counts = computed(model)
    want = chat(model, cache_implementation=implementation)
    assert counts == [FIRST, FIRST + 12, FIRST + 24, FIRST + 36]
    kbit.enable_prefix_caching(model)
    counts.clear()
    have = chat(model, cache_implementation=implementation)
    assert all(map(torch.equal, want, have))
    assert counts == [FIRST, 5, 5, 5]  # the answer's last token was not yet computed
    kbit.disable_prefix_caching(model)
    counts.clear()
    chat(model, 2)
    assert counts == [FIRST, FIRST + 12]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "glm4_moe_lite"])
def test_logits_are_those_of_the_whole_prompt(architecture):
    model = model_of(architecture)
    want, _ = logits_of(model, long := torch.cat((tokens(FIRST), tokens(20, 8)), 1))
    kbit.enable_prefix_caching(model)
    answer(model, tokens(FIRST), max_new_tokens=1, min_new_tokens=1)
    have, _ = logits_of(model, long)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", [None, "static"])
def test_an_answer_that_is_edited_is_computed_anew_from_there(implementation, computed):
    model = model_of()
    first = answer(model, tokens(FIRST))
    other = torch.cat((first[:, : FIRST + 4], tokens(8, 3)), 1)
    want = answer(model, other)
    kbit.enable_prefix_caching(model)
    counts = computed(model)
    answer(model, tokens(FIRST), cache_implementation=implementation)
    assert torch.equal(answer(model, other, cache_implementation=implementation), want)
    assert counts == [FIRST, 8]
    # The very same prompt: all but its last token is there.
    assert torch.equal(answer(model, other, cache_implementation=implementation), want)
    assert counts == [FIRST, 8]


def test_linear_attention_goes_on_or_begins_anew(computed):
    model = model_of("qwen3_next")
    other = torch.cat((tokens(FIRST), tokens(8, 3)), 1)
    want = answer(model, other)
    kbit.enable_prefix_caching(model)
    counts = computed(model)
    answer(model, tokens(FIRST))
    assert torch.equal(answer(model, other), want)  # its states have seen the first answer
    assert counts == [FIRST, FIRST + 8]


def test_sliding_windows_go_on():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=72, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    want = chat(model)
    kbit.enable_prefix_caching(model)
    assert all(map(torch.equal, want, chat(model)))
    assert len(kept_of(model)) == 1


@pytest.mark.parametrize("implementation", [None, "static"])
def test_conversations_with_a_common_beginning_are_kept_apart(implementation, computed):
    model = model_of()
    system = tokens(60, 1)
    chats = {seed: torch.cat((system, tokens(20, seed)), 1) for seed in (2, 3)}
    want = [answer(model, chats[2]), answer(model, chats[3])]
    kbit.enable_prefix_caching(model)
    for seed in (8, 9):  # the places are taken by others
        answer(model, tokens(FIRST, seed), cache_implementation=implementation)
    counts = computed(model)
    for seed, expected in zip((2, 3), want, strict=True):
        chats[seed] = answer(model, chats[seed], cache_implementation=implementation)
        assert torch.equal(chats[seed], expected)
    for seed in (2, 3):
        answer(model, torch.cat((chats[seed], tokens(4)), 1), cache_implementation=implementation)
    assert counts == [80, 20, 5, 5]
    assert len(kept_of(model)) == 2


def test_a_chat_goes_on_in_a_larger_cache(computed):
    """What the smaller one holds is copied; its successor has room for turns to come."""
    model = model_of()
    want = chat(model, 3)
    kbit.enable_prefix_caching(model)
    counts = computed(model)
    rooms, have, ids = set(), [], tokens(FIRST)
    for turn, longest in enumerate((300, 1100, 1200)):
        have.append(answer(model, ids, cache_implementation="static", max_cache_len=longest))
        rooms.add(kept_of(model)._kept[-1].cache.layers[0].max_cache_len)
        ids = torch.cat((have[-1], torch.tensor([[5, 6, 7, 8 + turn]])), 1)
    assert all(map(torch.equal, want, have))
    assert counts == [FIRST, 5, 5]
    assert rooms == {1024, 1792}
    assert len(kept_of(model)) == 1


def test_as_many_conversations_are_kept_as_was_asked_for(computed):
    model = model_of()
    kbit.enable_prefix_caching(model, 5)
    counts = computed(model)
    for seed in (1, 2, 3, 4, 5, 6, 2):
        answer(model, tokens(FIRST, seed))
    assert len(kept_of(model)) == 5
    assert counts == [FIRST] * 6  # the second is still there: all but a token
    answer(model, tokens(FIRST, 1))
    assert counts == [FIRST] * 7


def weights_change(model):
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)


def a_hook_comes(model):
    model.model.layers[0].register_forward_hook(lambda module, given, output: None)


def a_number_changes(model):
    model.model.layers[0].self_attn.scaling *= 2


@pytest.mark.parametrize("change", [weights_change, a_hook_comes, a_number_changes])
def test_what_does_not_hold_any_more_is_forgotten(change, computed):
    model = model_of()
    kbit.enable_prefix_caching(model)
    counts = computed(model)
    first = answer(model, tokens(FIRST))
    change(model)
    answer(model, first)
    assert counts == [FIRST, FIRST + NEW]


def test_calls_without_a_cache_get_none():
    model = model_of()
    want = answer(model, tokens(FIRST), use_cache=False)
    kbit.enable_prefix_caching(model)
    answer(model, tokens(FIRST))
    assert torch.equal(answer(model, tokens(FIRST), use_cache=False), want)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_keys_that_depend_on_the_length_are_not_kept(rope_type):
    config = LlamaConfig(
        vocab_size=72, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8, "original_max_position_embeddings": 60}, max_position_embeddings=240,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    kbit.enable_prefix_caching(model)
    answer(model, tokens(FIRST))
    assert not len(kept_of(model))


def test_models_that_are_not_known_to_go_on_keep_nothing():
    config = JambaConfig(
        vocab_size=72, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=2, attn_layer_offset=1, num_experts=1,
        use_mamba_kernels=False,
    )  # fmt: skip
    model = JambaForCausalLM(config).eval()
    want = chat(model, 2)
    kbit.enable_prefix_caching(model)
    assert all(map(torch.equal, want, chat(model, 2)))
    assert not len(kept_of(model))


def test_models_with_hooks_keep_nothing():
    model = model_of()
    kbit.enable_prefix_caching(model)
    model.model.layers[0].register_forward_hook(lambda module, given, output: None)
    with pytest.warns(UserWarning, match=r"model.layers.0 of LlamaForCausalLM has a hook.*computed whole"):
        answer(model, tokens(FIRST))
    assert not len(kept_of(model))


def test_soft_prompts_run_as_without():
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned = peft.get_peft_model(model_of(), settings).eval()
    want = chat(tuned, 2)
    kbit.enable_prefix_caching(tuned)
    assert all(map(torch.equal, want, chat(tuned, 2)))
    assert not len(kept_of(tuned.get_base_model()))


def test_all_logits_of_a_recorded_rest(small_heads):
    model = model_of()
    want = chat(model, 5)
    enable_on_cpu(model)
    kbit.enable_prefix_caching(model)
    assert all(map(torch.equal, want, chat(model, 5, cache_implementation="static", logits_to_keep=0)))


OTHERS = {
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "beams": {"num_beams": 2},
    "several answers": {"num_return_sequences": 2, "do_sample": True},
    "no cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 8},
    "guidance": {"guidance_scale": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 2},
    "positions": {"position_ids": torch.arange(FIRST)[None] + 1},
}


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_other_calls_run_as_without(more):
    model = model_of()
    kbit.enable_prefix_caching(model)
    torch.manual_seed(1)
    answer(model, tokens(FIRST))  # it does not get what is kept
    torch.manual_seed(1)
    have = answer(model, tokens(FIRST), **more)
    assert [len(kept.tokens) for kept in kept_of(model)._kept] == [FIRST + NEW - 1]
    kbit.disable_prefix_caching(model)
    torch.manual_seed(1)
    want = answer(model, tokens(FIRST), **more)
    if more.get("return_dict_in_generate"):
        have, want = have.sequences, want.sequences
    assert torch.equal(have, want)


def test_padding_several_prompts_embeddings_and_own_caches_run_as_without():
    model = model_of()
    kbit.enable_prefix_caching(model)
    mask = torch.ones(1, FIRST, dtype=torch.int64)
    mask[:, :3] = 0
    answer(model, tokens(FIRST), attention_mask=mask)
    answer(model, tokens(FIRST).expand(2, -1))
    answer(model, tokens(FIRST), **with_cache(DynamicCache(config=model.config)))
    model.generate(inputs_embeds=torch.zeros(1, 4, 40), max_new_tokens=2)
    assert not len(kept_of(model))


class Stopped(Exception):
    pass


@pytest.mark.parametrize(("architecture", "left"), [("llama", 1), ("qwen3_next", 0)])
def test_of_an_answer_that_is_cut_off_the_prompt_is_kept(architecture, left, computed):
    model = model_of(architecture)
    want = answer(model, long := torch.cat((tokens(FIRST), tokens(4, 3)), 1))
    kbit.enable_prefix_caching(model)
    counts = computed(model)

    def stop(ids, scores, **_):
        if ids.shape[1] > FIRST + 3:
            raise Stopped
        return torch.zeros(1, dtype=torch.bool)

    with pytest.raises(Stopped):
        answer(model, tokens(FIRST), stopping_criteria=StoppingCriteriaList([stop]))
    assert len(kept_of(model)) == left
    assert torch.equal(answer(model, long), want)
    assert counts == [FIRST, 4 if left else FIRST + 4]


def test_two_threads_have_caches_of_their_own():
    model = model_of()
    prompts = [tokens(FIRST, seed) for seed in range(4)]
    want = [answer(model, prompt) for prompt in prompts]
    kbit.enable_prefix_caching(model)
    found = {}

    def ask(number):
        found[number] = [answer(model, prompts[number]) for _ in range(3)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(want[number], each) for number, all_of in found.items() for each in all_of)


def test_copies_of_a_model_keep_their_own():
    model = model_of()
    kbit.enable_prefix_caching(model)
    answer(model, tokens(FIRST))
    other = copy.deepcopy(model)
    assert torch.equal(answer(other, tokens(FIRST)), answer(model, tokens(FIRST)))
    assert kept_of(other) is not kept_of(model)
    kbit.disable_prefix_caching(other)
    assert len(kept_of(model)) == 2
    again = pickle.loads(pickle.dumps(model))  # keeps nothing
    assert torch.equal(answer(again, tokens(FIRST)), answer(model, tokens(FIRST)))


def test_models_of_peft():
    peft = pytest.importorskip("peft")
    base = model_of()
    tuned = peft.get_peft_model(
        base, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    want = answer(tuned, tokens(FIRST))
    kbit.enable_prefix_caching(tuned)
    assert torch.equal(answer(tuned, tokens(FIRST)), want)
    assert torch.equal(answer(tuned, tokens(FIRST)), want)
    assert len(kept_of(base)) == 2
    with tuned.disable_adapter():  # other keys
        plain = answer(tuned, tokens(FIRST))
    kbit.disable_prefix_caching(tuned)
    with tuned.disable_adapter():
        assert torch.equal(answer(tuned, tokens(FIRST)), plain)


def test_what_cannot_be_enabled():
    with pytest.raises(TypeError, match="needs a model with transformers' generate.*got Linear"):
        kbit.enable_prefix_caching(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="conversations must be a whole number, got 1.5"):
        kbit.enable_prefix_caching(model_of(), 1.5)
    with pytest.raises(ValueError, match="conversations must be at least 1, got 0"):
        kbit.enable_prefix_caching(model_of(), 0)
    kbit.disable_prefix_caching(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("architecture", SOME)
def test_recorded_rests_of_prompts_give_the_same_answers(architecture, small_heads):
    model = model_of(architecture)
    want = chat(model, 5)
    prompts = Recorder()
    steps = enable_on_cpu(model, prompts)
    kbit.enable_prefix_caching(model)
    for _ in range(2):
        assert all(map(torch.equal, want, chat(model, 5, cache_implementation="static")))
    assert prompts.recorded >= 1
    assert prompts.replayed >= 4
    assert steps.recorded == 2  # the second chat is not the first one's end, and gets another cache


def test_rests_do_not_attend_to_all_the_room(small_heads, monkeypatch):
    model = model_of()
    want = chat(model, 3)
    enable_on_cpu(model)
    kbit.enable_prefix_caching(model)
    seen, own = set(), attention.attention

    def noted(module, query, key, value, mask, **named):
        if query.shape[2] > 1:
            seen.add((key.shape[2], value.shape[2], mask.shape[3]))
        return own(module, query, key, value, mask, **named)

    monkeypatch.setattr(attention, "attention", noted)
    have = chat(model, 3, cache_implementation="static", max_cache_len=3000)
    assert all(map(torch.equal, want, have))
    assert seen == {(1024, 1024, 1024)}


@given(st.integers(1, 10**6))
def test_keys_of_rests_are_less_than_1024_or_half_more(count):
    keys = static_caches.recorded_keys(count)
    assert count <= keys < max(count + 1024, 1.5 * count)
    assert static_caches.recorded_keys(keys) == keys


def test_a_rest_whose_layers_do_not_heed_padding_runs_as_transformers_has_it(small_heads, monkeypatch):
    """States that padding has gone into are put back."""
    model = model_of("qwen3_next")
    want = chat(model, 3)
    enable_on_cpu(model)
    kbit.enable_prefix_caching(model)
    own = prompt_rests.layers_of
    monkeypatch.setattr(prompt_rests, "layers_of", lambda cache: (*own(cache), 9)[1:])
    assert all(map(torch.equal, want, chat(model, 3, cache_implementation="static")))


def growing(count):
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.arange(count * 2.0).view(1, 1, count, 2), torch.zeros(1, 1, count, 2), layer)
    return cache


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_on_a_gpu(architecture):
    model = model_of(architecture).cuda()
    want = chat(model, 4)
    kbit.enable_cuda_graphs(model)
    kbit.enable_prefix_caching(model)
    for _ in range(2):
        assert all(map(torch.equal, want, chat(model, 4, cache_implementation="static")))


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_on_a_gpu_they_give_what_they_give_kernel_by_kernel(architecture):
    config = ARCHITECTURES[architecture]()
    if hasattr(config, "linear_key_head_dim"):  # kernels are for wide heads
        config.linear_key_head_dim = config.linear_value_head_dim = 128
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model = kbit.quantize_model(model, QuantizationPolicy(search=False)).cuda()
    kbit.enable_cuda_graphs(model)
    kbit.enable_prefix_caching(model)
    want = chat(model, 4, cache_implementation="static")
    recorded = model.get_compiled_call(None).prompts._rests._recordings._known
    assert any(one.replay for known in recorded.values() for one in known.values())
    for _ in range(3):
        assert all(map(torch.equal, want, chat(model, 4, cache_implementation="static")))


@pytest.mark.gpu
def test_what_is_kept_makes_room_on_a_gpu(monkeypatch):
    model = model_of().cuda()
    kbit.enable_prefix_caching(model, 3)
    for seed in (1, 2):
        answer(model, tokens(FIRST, seed))
    assert len(kept_of(model)) == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (-(2**40), 2**40))
    answer(model, tokens(FIRST, 3))
    assert len(kept_of(model)) == 1


def test_what_was_used_longest_ago_makes_room():
    conversations = Conversations(4)
    for count in (20, 30, 40):
        conversations.keep(Kept(growing(count), torch.arange(count), "model"))
    one = 2 * 2 * 2 * 4  # bytes of a token: layers, keys and values, columns, float32
    conversations.make_room(100, free=100 * one)
    assert len(conversations) == 3
    conversations.make_room(100, free=90 * one)
    assert len(conversations) == 2
    conversations.make_room(10**6, free=0)
    assert not len(conversations)


def test_a_call_that_runs_out_of_memory_forgets_all(monkeypatch):
    model = model_of()
    kbit.enable_prefix_caching(model)
    answer(model, tokens(FIRST))

    def full(ids, scores, **_):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        answer(model, tokens(FIRST, 2), stopping_criteria=StoppingCriteriaList([full]))
    assert not len(kept_of(model))


BITS = st.integers(0, 1)


@given(
    st.lists(st.lists(BITS, min_size=17, max_size=40), max_size=4), st.lists(BITS, min_size=1, max_size=45)
)
def test_a_prompt_gets_what_it_begins_with(held, prompt):
    conversations = Conversations(4)
    for each in held:
        conversations.keep(Kept(growing(len(each)), torch.tensor(each), "model"))
    prompt = torch.tensor(prompt)
    found = conversations.find(prompt, None, "model")
    best = max((shared(each, prompt.tolist()[:-1]) for each in held), default=0)
    if best < 16:
        assert found is None
        assert len(conversations) <= 3
    else:
        assert length_of(found.cache) == found.shared == best
        assert torch.equal(found.cache.layers[1].keys, growing(best).layers[1].keys)
    assert conversations.find(prompt, None, "another model") is None


def shared(left, right):
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_what_is_lent_grows_apart():
    cache = growing(20)
    other = lent(cache, 5)
    other.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    assert torch.equal(cache.layers[0].keys, growing(20).layers[0].keys)
    assert other.layers[0].keys.shape[2] == 6


def test_lengths_of_layers_that_are_not_alike_or_not_known():
    cache = growing(20)
    cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)  # a step that was interrupted
    assert length_of(cache) is None
    cache = growing(3)
    cache.layers[0].__class__ = type("OtherLayer", (type(cache.layers[0]),), {})
    assert length_of(cache) is None
