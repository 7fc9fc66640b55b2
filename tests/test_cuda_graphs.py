"""`generate` from recorded steps gives the same tokens: CUDA graphs, or, on a CPU, what stands for them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import warnings
import weakref

import peft
import pytest
import torch
import transformers
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, StaticCache

import kbit
from graph_tape import REFUSED, Recorder, compile_on_cpu
from kbit.cli.generate import _decode_fast, generate
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import (
    attention,
    attention_steps,
    compiled_layers,
    cuda_graphs,
    late_masks,
    recordings,
)
from kbit.integrations.transformers.cache_argument import cache_in, cache_name, with_cache
from tiny_models import ARCHITECTURES, build

gpu = pytest.mark.gpu
TOKENS = 12
IDS = torch.tensor([[3, 5, 7, 11, 13], [0, 0, 2, 4, 6]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])  # the second is shorter, padded on the left
SETTINGS = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": True, "top_k": 0}


def quantized(architecture, dtype=torch.float32, device="cpu"):
    model = kbit.quantize_model(build(architecture, dtype, spread=False), QuantizationPolicy())
    return model.to(device)


def sampled(model, ids=IDS, **more):
    """Tokens drawn from a generator that begins anew."""
    torch.manual_seed(1)
    mask = MASK[: len(ids)].to(model.device)
    return model.generate(ids.to(model.device), attention_mask=mask, **SETTINGS | more)


def logits(model):
    """Of every step of a greedy answer."""
    more = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    return torch.stack(sampled(model, cache_implementation="static", **more).logits)


def recorded(model):
    """A recorder that the model's steps go through; `generate` then compiles on a CPU, too."""
    recorder = Recorder()
    steps = cuda_graphs.Steps(model, record=recorder)
    model.get_compiled_call = lambda config=None: steps
    vars(model).update(late_masks.late_masks(model))
    compile_on_cpu(model)
    return recorder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_recorded_steps_give_the_same_tokens(architecture):
    model = quantized(architecture)
    expected = sampled(model)
    recorder = recorded(model)
    assert torch.equal(sampled(model, cache_implementation="static"), expected)
    # The prompt gives the first token; steps of the warm-up follow.
    assert (recorder.recorded, recorder.replayed) == (1, TOKENS - 1 - cuda_graphs.WARM_STEPS)


def test_a_kept_cache_keeps_its_recording():
    model = quantized("llama")
    expected = sampled(model), sampled(model, IDS[:1])
    recorder = recorded(model)
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + TOKENS)
    for _ in range(3):
        cache.reset()
        assert torch.equal(sampled(model, **with_cache(cache)), expected[0])
    assert recorder.recorded == 1
    assert recorder.replayed == 3 * (TOKENS - 1) - cuda_graphs.WARM_STEPS
    for _ in range(2):
        assert torch.equal(sampled(model, IDS[:1], cache_implementation="static"), expected[1])
    assert recorder.recorded == 3  # a cache of its own each time


def test_the_last_cache_is_kept_where_nobody_has_it():
    model = quantized("qwen3_next")
    expected = sampled(model), sampled(model, IDS[:1]), sampled(model, max_new_tokens=TOKENS + 20)
    kbit.enable_cuda_graphs(model)
    recorder = recorded(model)
    for _ in range(3):
        assert torch.equal(sampled(model, cache_implementation="static"), expected[0])
    assert recorder.recorded == 1
    assert torch.equal(sampled(model, IDS[:1], cache_implementation="static"), expected[1])  # another batch
    assert recorder.recorded == 2
    longer = {"max_new_tokens": TOKENS + 20, "cache_implementation": "static"}
    assert torch.equal(sampled(model, **longer), expected[2])
    assert recorder.recorded == 3
    held = sampled(model, return_dict_in_generate=True, **longer)
    keys = cache_in(held).layers[1].keys.clone()
    assert recorder.recorded == 3
    assert torch.equal(sampled(model, cache_implementation="static"), expected[0])
    assert torch.equal(cache_in(held).layers[1].keys, keys)
    assert recorder.recorded == 4


def test_a_cache_whose_tensors_were_replaced_is_recorded_again():
    model = quantized("qwen3_next")
    expected = sampled(model)
    recorder = recorded(model)
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + TOKENS)
    for times in (1, 2):
        cache.reset()
        assert torch.equal(sampled(model, **with_cache(cache)), expected)
        assert recorder.recorded == times
        cache.reorder_cache(torch.tensor([1, 0]))


def test_recordings_go_with_their_cache_and_their_model():
    model = quantized("llama")
    recorded(model)
    cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + TOKENS)
    sampled(model, **with_cache(cache))
    steps, seen = model.get_compiled_call(), weakref.ref(cache)
    assert len(steps._recordings) == 1
    del cache
    gc.collect()
    assert seen() is None
    assert len(steps._recordings) == 0
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_other_weights_are_recorded_again():
    model = quantized("llama")
    kbit.enable_cuda_graphs(model)
    steps = model.get_compiled_call(None)
    cache = StaticCache(config=model.config, max_cache_len=8)
    for _ in range(2):
        steps._recordings._known[cache] = {}
        assert model.get_compiled_call(None) is steps
        assert len(steps._recordings) == 1
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 2)
        model.get_compiled_call(None)
        assert len(steps._recordings) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: setattr(layers[0].mlp.gate, "top_k", 1),
        lambda layers: setattr(layers[1].self_attn, "scaling", 0.1),
        lambda layers: setattr(layers[0].mlp, "forward", lambda x: x),
        lambda layers: setattr(layers[0].mlp.experts, "act_fn", torch.nn.GELU()),
    ],
    ids=["choices", "scaling", "forward", "activation"],
)
def test_other_settings_are_recorded_again(change):
    model = quantized("qwen3_next")
    kbit.enable_cuda_graphs(model)
    steps = model.get_compiled_call(None)
    cache = StaticCache(config=model.config, max_cache_len=8)
    steps._recordings._known[cache] = {}
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert len(model.get_compiled_call(None)._recordings) == 1
    change(model.model.layers)
    assert len(model.get_compiled_call(None)._recordings) == 0


def test_other_adapters_are_recorded_again():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(quantized("llama"), config).eval()
    kbit.enable_cuda_graphs(model)
    base = model.get_base_model()
    cache = StaticCache(config=base.config, max_cache_len=8)

    def is_kept() -> bool:
        kept = cache in base.get_compiled_call(None)._recordings
        base.get_compiled_call(None)._recordings._known[cache] = {}
        return kept

    is_kept()
    assert is_kept()
    with model.disable_adapter():
        assert not is_kept()
        assert is_kept()
    assert not is_kept()
    model.add_adapter("other", config)
    model.set_adapter("other")
    assert not is_kept()
    base.model.layers[0].self_attn.q_proj.set_scale("other", 3.0)
    assert not is_kept()
    kbit.disable_cuda_graphs(model)
    assert "get_compiled_call" not in vars(base)


def test_a_cache_of_inference_mode_is_not_changed_outside():
    model = quantized("llama")
    expected = sampled(model)
    kbit.enable_cuda_graphs(model)
    recorder = recorded(model)
    for times in (1, 2):
        with torch.inference_mode():
            assert torch.equal(sampled(model, cache_implementation="static"), expected)
        assert recorder.recorded == 2 * times - 1
        assert torch.equal(sampled(model, cache_implementation="static"), expected)
        assert recorder.recorded == 2 * times


def synchronize(module, arguments, output):
    """A hook that looks at values on the host."""
    assert output.sum().item() != 0.5


def test_what_cannot_be_recorded_runs_all_the_same():
    model = quantized("qwen3_next")
    model.lm_head.register_forward_hook(synchronize)
    expected = logits(model)
    recorder = recorded(model)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match=f"CausalLM run without CUDA graphs: {REFUSED}."):
        assert torch.equal(logits(model), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error", cuda_graphs.CUDAGraphWarning)  # one is enough
        assert torch.equal(logits(model), expected)
    assert recorder.recorded == 0


def test_a_cache_that_counts_in_python_is_put_back(monkeypatch):
    from transformers.cache_utils import StaticLayer

    update = StaticLayer.update

    def counting(self, *arguments, **named):
        self.seen = [*getattr(self, "seen", []), 1.0]
        keys, values = update(self, *arguments, **named)
        return keys * len(self.seen), values

    monkeypatch.setattr(StaticLayer, "update", counting)
    model = quantized("qwen3")
    expected = logits(model)
    recorder = recorded(model)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="its cache counts or allocates in Python"):
        assert torch.equal(logits(model), expected)
    assert (recorder.recorded, recorder.replayed) == (1, 0)


def test_caches_of_no_fixed_size_are_not_recorded():
    model = quantized("llama")
    recorder = Recorder()
    steps = cuda_graphs.Steps(model, record=recorder)
    cache, plain = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="its cache is not of a fixed size"):
        have = [steps(input_ids=IDS[:, :1], **with_cache(cache)).logits for _ in range(5)]
    want = [model(input_ids=IDS[:, :1], **with_cache(plain)).logits for _ in range(5)]
    assert torch.equal(torch.stack(have), torch.stack(want))
    assert recorder.recorded == 0


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "qwen3_5_moe"])
def test_prompts_in_chunks_are_not_recorded(architecture):
    model = quantized(architecture)
    prompts = [torch.randint(1, 72, (1, length)) for length in (16, 14, 16, 14, 16, 14)]
    settings = {"prefill_chunk_size": 4, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    settings |= {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": "static"}

    def all_logits():
        return [torch.stack(model.generate(ids, **settings).logits) for ids in prompts]

    expected = all_logits()
    kbit.enable_cuda_graphs(model)
    recorded(model)
    for have, want in zip(all_logits(), expected, strict=True):
        assert torch.equal(have, want)


def test_hooks_are_recorded_again():
    model = quantized("llama")
    kbit.enable_cuda_graphs(model)
    steps = model.get_compiled_call(None)
    cache = StaticCache(config=model.config, max_cache_len=8)
    steps._recordings._known[cache] = {}
    assert model.get_compiled_call(None) is steps
    assert cache in steps._recordings
    hook = model.model.layers[1].register_forward_hook(lambda module, arguments, output: output * 2)
    with pytest.warns(
        cuda_graphs.CUDAGraphWarning,
        match=r"layers.1 of LlamaForCausalLM has a hook or its own forward, test_cuda",
    ):
        model.get_compiled_call(None)
    assert not model.get_compiled_call(None)._recordings
    steps._recordings._known[cache] = {}
    hook.remove()
    assert not model.get_compiled_call(None)._recordings


def sliding():
    config = MistralConfig(**ARCHITECTURES["llama"]().to_diff_dict() | {"sliding_window": 4})
    return MistralForCausalLM(config).eval()


def test_sliding_windows_are_not_recorded():
    model = sliding()
    expected = sampled(model, cache_implementation="static")
    recorder = recorded(model)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="its cache has a sliding window"):
        assert torch.equal(sampled(model, cache_implementation="static"), expected)
    assert recorder.recorded == 0


def test_models_on_several_devices_are_not_recorded():
    model = quantized("llama")
    model.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": 1}
    recorder = Recorder()
    steps = cuda_graphs.Steps(model, record=recorder)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="it is on 2 devices"):
        steps(input_ids=IDS[:, :1], **with_cache(cache))
    for _ in range(3):
        steps(input_ids=IDS[:, :1], **with_cache(cache))
    assert recorder.recorded == 0


def test_inputs_that_cannot_be_copied_are_not_recorded():
    class Mask:
        pass

    model = quantized("llama")
    recorder = Recorder()
    steps = cuda_graphs.Steps(model, record=recorder)
    cache = StaticCache(config=model.config, max_cache_len=8)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="an input is a Mask, not a tensor"):
        steps(input_ids=IDS[:, :1], **with_cache(cache), extra=Mask())
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match=f"it has no {cache_name()}"):
        steps(input_ids=IDS[:, :1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(input_ids=IDS)
    assert recorder.recorded == 0


def test_outputs_of_every_layer_are_the_steps_own():
    model = quantized("llama")
    more = {"output_hidden_states": True, "output_logits": True, "return_dict_in_generate": True}
    expected = sampled(model, cache_implementation="static", **more)
    recorder = recorded(model)
    have = sampled(model, cache_implementation="static", **more)
    assert recorder.replayed > 2
    for one, other in zip(have.logits, expected.logits, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(have.hidden_states, expected.hidden_states, strict=True):
        assert all(map(torch.equal, one, other))


def test_on_a_cpu_nothing_changes():
    model = quantized("llama")
    expected = sampled(model)
    kbit.enable_cuda_graphs(model)
    assert torch.equal(sampled(model, cache_implementation="static"), expected)
    twin = copy.deepcopy(model)
    steps = [each.get_compiled_call(None) for each in (model, twin, model, twin)]
    assert steps[:2] == steps[2:]
    assert steps[0] is not steps[1]
    read = pickle.loads(pickle.dumps(model))
    for _ in range(2):
        kbit.disable_cuda_graphs(model)
    for plain in (model, read):
        assert not isinstance(plain.get_compiled_call(None), cuda_graphs.Steps)


def test_kbit_generate_decodes_from_graphs_on_a_gpu(monkeypatch, capsys):
    def placed(model):
        monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
        return model

    assert _decode_fast(quantized("llama"), False) == {}
    model = placed(quantized("llama"))
    assert _decode_fast(model, True) == {"cache_implementation": "static"}
    assert model.get_compiled_call(None)._compile_layers
    assert _decode_fast(placed(sliding()), False) == {}
    assert "without CUDA graphs: its cache has a sliding window" in capsys.readouterr().err


def test_kbit_generate_compiles_on_gpus_alone(tmp_path):
    with pytest.raises(ValueError, match="--compile is for GPUs, and the device is cpu. Add --device cuda"):
        generate(tmp_path, "hi", compiled=True)


def test_other_models_are_refused():
    with pytest.raises(TypeError, match=r"needs a model with transformers' generate\(\), got Linear"):
        kbit.enable_cuda_graphs(torch.nn.Linear(2, 2))
    model = quantized("llama")
    with pytest.raises(TypeError, match=r"needs a model with transformers' generate\(\), got LlamaModel"):
        kbit.enable_cuda_graphs(model.model)
    tuned = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(TypeError, match="PromptTuningConfig puts tokens in front"):
        kbit.enable_cuda_graphs(tuned)
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(TypeError, match="LlamaForCausalLM has no decoder with layers"):
        kbit.enable_cuda_graphs(model, compile_layers=True)


def test_compiled_kernels_may_overlap(monkeypatch):
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", "0")
    with inductor.patch("triton.enable_pdl", False):
        compiled_layers.overlap_kernels()
        assert inductor.triton.enable_pdl
    assert not inductor.triton.enable_pdl
    assert os.environ["TORCHINDUCTOR_ENABLE_PDL"] == "1"


def test_layers_are_compiled_for_steps_alone(own_compilations):
    model = quantized("llama")
    compiled = {}
    with compiled_layers.compiled_layers(model, compiled):
        first = [layer._compiled_call_impl for layer in model.model.layers]
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    model.model.layers[0]._compiled_call_impl = own = model.model.layers[0].forward  # a user's
    with compiled_layers.compiled_layers(model, compiled):
        assert [layer._compiled_call_impl for layer in model.model.layers] == first
        output = model(IDS).logits
    assert [layer._compiled_call_impl for layer in model.model.layers] == [own, None]
    torch.testing.assert_close(output, model(IDS).logits, rtol=1e-3, atol=1e-4)


def test_layers_stay_compiled_until_the_last_thread_leaves(own_compilations):
    model, compiled = quantized("llama"), {}
    layers = model.model.layers
    first, last = (contextlib.ExitStack() for _ in range(2))
    for stack in (first, last):
        stack.enter_context(compiled_layers.compiled_layers(model, compiled))
    first.close()
    assert [layer._compiled_call_impl for layer in layers] == [compiled[layer] for layer in layers]
    last.close()
    assert [layer._compiled_call_impl for layer in layers] == [None] * len(layers)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_graphs_give_the_same_tokens(architecture, dtype, monkeypatch):
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: False)  # the same attention for all steps
    model = quantized(architecture, dtype, "cuda")
    expected = sampled(model, cache_implementation="static", disable_compile=True)
    kbit.enable_cuda_graphs(model)
    if dtype == torch.float32 and kbit.nn.KbitExperts in map(type, model.modules()):
        with pytest.warns(cuda_graphs.CUDAGraphWarning, match="without CUDA graphs: Cannot copy between CPU"):
            assert torch.equal(sampled(model, cache_implementation="static"), expected)
        return  # experts in float32 are decoded, which ones, the host has to know
    with warnings.catch_warnings():
        warnings.simplefilter("error", cuda_graphs.CUDAGraphWarning)
        for _ in range(2):
            assert torch.equal(sampled(model, cache_implementation="static"), expected)
        cache = StaticCache(config=model.config, max_cache_len=IDS.shape[1] + TOKENS)
        for _ in range(3):
            cache.reset()
            assert torch.equal(sampled(model, **with_cache(cache)), expected)
    kbit.disable_cuda_graphs(model)
    assert torch.equal(sampled(model, cache_implementation="static", disable_compile=True), expected)


def test_streams_share_a_pool_one_after_the_other(monkeypatch):
    class Stream:
        def __init__(self):
            self.waited = []

        def wait_stream(self, other):
            self.waited.append(other)

    one, other, ran = Stream(), Stream(), []
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(ran) + 1))
    monkeypatch.setattr(
        recordings, "record_cuda_graph", lambda run, device, pool: (lambda: ran.append(pool), run())
    )
    record = recordings.SharedPool()
    replay, _ = record(dict, torch.device("cpu"))
    for stream in (one, one, other, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        replay()
    assert (one.waited, other.waited) == ([other], [one])

    def fail(run, device, pool):
        raise RuntimeError

    with monkeypatch.context() as failing:
        failing.setattr(recordings, "record_cuda_graph", fail)
        with pytest.raises(RuntimeError):
            record(dict, torch.device("cpu"))
    record(dict, torch.device("cpu"))[0]()
    assert ran == [(0, 1)] * 4 + [(0, 5)]


def test_calls_under_other_circumstances_are_recorded_apart():
    cpu = torch.device("cpu")
    with torch.autocast("cpu", torch.float16):
        half = recordings.circumstances(cpu)
    with torch.autocast("cpu", torch.bfloat16):
        brain = recordings.circumstances(cpu)
    with torch.inference_mode():
        inference = recordings.circumstances(cpu)
    assert len({half, brain, inference, recordings.circumstances(cpu)}) == 4
    assert recordings.circumstances(torch.device("meta")) == (False, None)  # of an offloaded model


@gpu
def test_a_step_that_waits_for_the_gpu_runs_without_graphs(monkeypatch):
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: False)
    model = quantized("llama", torch.bfloat16, "cuda")
    own = model.lm_head.forward
    model.lm_head.forward = lambda x: own(x) + 0 * own(x).sum().item()
    expected = sampled(model, cache_implementation="static", disable_compile=True)
    kbit.enable_cuda_graphs(model)
    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="steps .* without CUDA graphs: CUDA error"):
        assert torch.equal(sampled(model, cache_implementation="static"), expected)
    assert torch.equal(sampled(model, cache_implementation="static"), expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_another_device_than_the_current_one(monkeypatch):
    monkeypatch.setattr(attention, "_cudnn_takes", lambda *tensors: False)
    for device in ("cuda:0", "cuda:1"):
        model = quantized("qwen3_moe", torch.float16, device)
        expected = sampled(model, cache_implementation="static", disable_compile=True)
        kbit.enable_cuda_graphs(model)
        assert torch.equal(sampled(model, cache_implementation="static"), expected)


@gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_graphs_of_compiled_layers(architecture, own_compilations):
    model = quantized(architecture, torch.float16, "cuda")
    more = {"output_logits": True, "return_dict_in_generate": True, "cache_implementation": "static"}
    expected = sampled(model, disable_compile=True, **more)
    kbit.enable_cuda_graphs(model, compile_layers=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", cuda_graphs.CUDAGraphWarning)
        have = sampled(model, **more)
    # Fused kernels round otherwise, so that another token may be drawn; from there on all differs.
    same = (have.sequences == expected.sequences).all(0)[IDS.shape[1] :].long().cumprod(0)
    compared = min(int(same.sum()) + 1, TOKENS)
    assert compared > cuda_graphs.WARM_STEPS + 2
    for one, other in zip(have.logits[:compared], expected.logits[:compared], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=5e-3)


def test_models_with_an_encoder_are_told_that_they_have_no_graphs():
    sizes = {"vocab_size": 72, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)
    )
    with pytest.warns(kbit.CUDAGraphWarning, match="T5ForConditionalGeneration runs without CUDA graphs"):
        kbit.enable_cuda_graphs(model)
    more = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    assert model.generate(IDS, **more).shape == (len(IDS), 5)


def test_enabling_again_tries_layers_anew():
    model = quantized("llama")
    known, layer = attention_steps.Tried(), model.model.layers[0].self_attn
    assert attention_steps.tried(known, layer, None, lambda: 1) == 1
    assert attention_steps.tried(known, layer, None, lambda: 2) == 1
    kbit.enable_cuda_graphs(model)
    assert attention_steps.tried(known, layer, None, lambda: 2) == 2


def test_disabling_frees_what_an_enabled_copy_shares():
    model = quantized("llama")
    kbit.enable_cuda_graphs(model)
    steps = weakref.ref(model.get_compiled_call(None))
    model.generate(IDS, cache_implementation="static", max_new_tokens=2)
    twin = copy.deepcopy(model)
    kbit.disable_cuda_graphs(model)
    gc.collect()
    assert steps() is None
    assert twin.get_compiled_call(None) is not None
