"""Layers whose weights are tiles: the same results, state dicts, moves, copies and saves. No GPU needed."""

import copy
import gc
import pickle
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kbit
from kbit.format import SUPPORTED_BITS
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, QuantizedModule, quantize_model
from kbit.ops import forms
from test_nn import Experts, Toy, decoded, routed, tiny_weights
from tiny_models import ARCHITECTURES, build


def pair(n=48, k=100, bits=4, scaled=False, bias=True):
    """A layer, and the same one prepared."""
    source = nn.Linear(k, n, bias=bias)
    layer = KbitLinear.from_linear(tiny_weights(source) if scaled else source, bits=bits)
    twin = copy.deepcopy(layer)
    twin.prepare(force=True)
    return layer, twin


def held(layer):
    return {name for name, _ in layer.named_parameters(recurse=False)}


def assert_same_state(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


# -- KbitLinear ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_a_prepared_layer_computes_and_saves_the_same(bits, scaled):
    layer, twin = pair(bits=bits, scaled=scaled)
    assert held(twin) == held(layer) - {"weight_packed", "weight_absmax"} | {"weight_tiled"}
    x = torch.randn(2, 3, 100)
    close(twin(x), layer(x))
    assert torch.equal(twin(torch.eye(100)) - twin.bias, layer.dequantize().T + twin.bias - twin.bias)
    assert torch.equal(twin.dequantize(), layer.dequantize())
    assert_same_state(twin, layer)
    twin.restore()
    assert held(twin) == held(layer)
    assert torch.equal(twin(x), layer(x))


def test_canonical_parts_can_be_read_at_any_time():
    layer, twin = pair()
    assert torch.equal(twin.weight_packed, layer.weight_packed)
    assert torch.equal(twin.weight_absmax, layer.weight_absmax)
    assert twin.weight is twin.weight_tiled
    assert (twin.weight.dtype, twin.weight.device) == (torch.int32, torch.device("cpu"))
    assert twin.quantized().tiled.data_ptr() == twin.weight_tiled.data_ptr()
    assert not hasattr(twin, "weight_else")
    assert not hasattr(layer, "weight_tiled")


def test_setting_a_canonical_part_gives_the_tiles_up():
    layer, twin = pair()
    twin.weight_packed = nn.Parameter(torch.zeros_like(layer.weight_packed), requires_grad=False)
    assert held(twin) == {"bias", "weight_packed", "weight_absmax"}
    assert torch.equal(twin.weight_absmax, layer.weight_absmax)
    assert not twin.weight_packed.any()


def test_state_dicts_load_into_tiles_in_place():
    _, twin = pair()
    for scaled in (True, False):
        other, _ = pair(scaled=scaled)
        address = twin.weight_tiled.data_ptr()
        twin.load_state_dict(other.state_dict())
        assert twin.weight_tiled.data_ptr() == address, "a captured CUDA graph reads there"
        assert_same_state(twin, other)
        close(twin(torch.ones(1, 100)), other(torch.ones(1, 100)))


def test_a_state_dict_that_does_not_fit_is_refused():
    layer, twin = pair()
    for module in (layer, twin):  # what fits, such as the block scales here, is loaded, as ever
        with pytest.raises(RuntimeError, match="weight_packed"):
            module.load_state_dict(KbitLinear(100, 48, bits=3).state_dict())
    assert_same_state(twin, layer)
    assert twin.load_state_dict({}, strict=False).missing_keys == ["bias", "weight_packed", "weight_absmax"]
    assert twin.load_state_dict({"bias": layer.bias}, strict=False).missing_keys[0] == "weight_packed"
    assert_same_state(twin, layer)


def test_assigning_a_state_dict():
    layer, twin = pair()
    twin.load_state_dict(layer.state_dict(), assign=True)
    assert_same_state(twin, layer)
    with torch.device("meta"):
        empty = KbitLinear(100, 48)
    empty.load_state_dict(layer.state_dict(), assign=True)
    empty.reset_constants(layer.codebook)
    assert torch.equal(empty(torch.ones(1, 100)), layer(torch.ones(1, 100)))


@pytest.mark.parametrize("cast", [nn.Module.half, nn.Module.bfloat16, lambda m: m.to("cpu", torch.float16)])
def test_casting_leaves_tiles_alone(cast):
    layer, twin = pair(scaled=True)
    cast(twin)
    assert "weight_tiled" in held(twin)
    assert twin.bias.dtype != torch.float32
    assert torch.equal(twin.weight_packed, layer.weight_packed)
    assert twin.weight_scale.dtype == torch.float32


def test_where_no_kernel_reads_tiles_a_move_restores():
    layer, twin = pair()
    twin.to("meta")
    assert held(twin) == held(layer)
    assert twin.weight_packed.shape == layer.weight_packed.shape
    assert twin.to_empty(device="cpu").weight_packed.dtype == torch.int32


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_prepared_layers_survive_deepcopy_and_pickle(clone):
    model = Toy().eval()
    quantize_model(model, kbit.QuantizationPolicy(embedding_bits=4))
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.prepare(force=True)
    twin = clone(model)
    ids = torch.arange(9)
    assert torch.equal(twin(ids), model(ids))
    assert_same_state(twin, model)
    assert "weight_tiled" in held(twin.block["up_proj"])
    assert twin.lm_head.weight_packed is twin.embed_tokens.weight_packed


def test_gradients_pass_through_tiles():
    layer, twin = pair()
    with torch.inference_mode():
        twin.restore()
        twin.prepare(force=True)  # not as tensors that can never be saved for a backward pass
    grads = []
    for module in (layer, twin):
        x = torch.ones(5, 100, requires_grad=True)
        module(x).square().sum().backward()
        grads.append((x.grad, module.bias.grad))
    close(*grads)


def test_a_prepared_layer_compiles_whole_with_any_number_of_rows():
    _, twin = pair()
    compiled = torch.compile(twin, fullgraph=True, dynamic=True)
    for rows in (1, 3, 7):
        x = torch.randn(rows, 100)
        assert torch.equal(compiled(x), twin(x))


def test_errors_name_the_layer():
    layer = KbitLinear.from_linear(nn.Linear(64, 8), name="layers.3.mlp.down_proj")
    layer.prepare(force=True)
    with pytest.raises(ValueError, match=r"65 features.*expects 64 \(layers\.3\.mlp\.down_proj\)"):
        layer(torch.zeros(1, 65))


def test_replicas_of_data_parallel_multiply_tiles():
    _, twin = pair()
    replica = twin._replicate_for_data_parallel()
    for name, parameter in twin._parameters.items():  # what nn.parallel.replicate does
        setattr(replica, name, parameter.data)
    x = torch.ones(2, 100)
    assert torch.equal(replica(x), twin(x))


def test_other_scale_formats_and_embeddings_stay_canonical(tiles_pay):
    layer = KbitLinear.from_linear(nn.Linear(64, 8), absmax_format="float16")
    table = KbitEmbedding.from_embedding(nn.Embedding(30, 40))
    for module in (layer, table):
        module.prepare(force=True)
        assert {"weight_packed", "weight_absmax"} <= held(module)
    layer(torch.ones(1, 64))
    assert "weight_packed" in held(layer)


# -- when layers are prepared --------------------------------------------------------------------------------


def test_filling_loading_moving_and_calling_prepare(tiles_pay):
    layer = KbitLinear.from_linear(nn.Linear(64, 8))
    assert "weight_tiled" in held(layer)
    fresh = KbitLinear(64, 8)
    assert "weight_packed" in held(fresh)
    fresh.load_state_dict(layer.state_dict())
    assert "weight_tiled" in held(fresh)
    fresh.restore()
    assert "weight_tiled" in held(fresh.to("cpu"))
    fresh.restore()
    assert torch.equal(fresh(torch.ones(1, 64)), layer(torch.ones(1, 64)))
    assert "weight_tiled" in held(fresh)


def test_preparing_frees_the_canonical_form():
    source = nn.Linear(64, 8)
    layer = KbitLinear.from_linear(source)
    held_before = [weakref.ref(part) for part in (layer.weight_packed, layer.weight_absmax)]
    assert all(ref() is not None for ref in held_before)
    layer.prepare(force=True)
    q = kbit.quantize(source.weight.detach())
    held_before += [weakref.ref(part) for part in q.canonical()]
    q.tile()
    gc.collect()
    assert all(ref() is None for ref in held_before)


def test_tracing_and_accelerate_s_hooks_leave_the_form_alone(tiles_pay):
    layer = KbitLinear.from_linear(nn.Linear(64, 8))
    layer.restore()
    x = torch.ones(1, 64)
    y = torch.compile(layer, fullgraph=True)(x)
    assert "weight_packed" in held(layer)
    moves = SimpleNamespace(offload=True)
    for hook in (moves, SimpleNamespace(hooks=(SimpleNamespace(), moves))):
        layer._hf_hook = hook
        assert torch.equal(layer(x), y)
        assert "weight_packed" in held(layer)
    layer._hf_hook = SimpleNamespace(offload=False)
    layer(x)
    assert "weight_tiled" in held(layer)


def test_threads_prepare_a_layer_once(tiles_pay):
    layer = KbitLinear.from_linear(nn.Linear(64, 8))
    layer.restore()
    x = torch.ones(1, 64)
    results = []
    threads = [threading.Thread(target=lambda: results.append(layer(x))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(y, results[0]) for y in results)


def test_a_thread_finds_one_form_or_the_other():
    layer, twin = pair()
    x = torch.randn(2, 100)
    expected, wrong, done = layer(x), [], threading.Event()

    def call() -> None:
        while not done.is_set():
            try:
                torch.testing.assert_close(twin(x), expected)
            except Exception as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        twin.restore()
        twin.prepare(force=True)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tied_weights_stay_canonical_and_shared(tiles_pay):
    model = Toy()
    quantize_model(model, kbit.QuantizationPolicy(embedding_bits=4))
    model(torch.arange(3))
    model.to("cpu")
    assert model.lm_head.weight_packed is model.embed_tokens.weight_packed
    assert "weight_tiled" in held(model.block["up_proj"])
    first, second = KbitLinear.from_linear(nn.Linear(64, 8)), KbitLinear(64, 8)
    second.share(first)
    assert second.weight_packed is first.weight_packed
    assert torch.equal(first(torch.ones(1, 64)) - first.bias, second(torch.ones(1, 64)) - second.bias)


def test_tiles_take_no_tensors_of_the_other_form(tiles_pay):
    """torch.func sets what it has as attributes, which nothing would read."""
    layer, other = (KbitLinear.from_linear(nn.Linear(64, 8), name="mid") for _ in range(2))
    x, want = torch.randn(2, 64), other(torch.ones(2, 64))
    layer(x)
    with pytest.raises(
        TypeError, match=r"weight_packed cannot be replaced by a tensor.*\(mid\)\. Call restore"
    ):
        torch.func.functional_call(layer, other.state_dict(), (x,))
    assert "weight_packed" not in vars(layer)
    forms.set_rule(lambda op, device: False)
    layer.restore()
    close(torch.func.functional_call(layer, other.state_dict(), (torch.ones(2, 64),)), want)


def test_memory_formats_leave_tiles_as_they_are(tiles_pay):
    experts = quantize_model(Toy().eval(), kbit.QuantizationPolicy(search=False)).experts
    experts.prepare(force=True)
    tiles = dict(experts.named_parameters())
    before = {name: part.stride() for name, part in tiles.items()}
    experts.to(memory_format=torch.channels_last)
    assert {name: part.stride() for name, part in experts.named_parameters()} == before


def test_a_quantized_model_computes_the_same_in_either_form(tiles_pay):
    torch.manual_seed(1)
    model = Toy(tied=False).eval()
    plain = copy.deepcopy(model)
    policy = kbit.QuantizationPolicy(bits=3, embedding_bits=4)
    quantize_model(model, policy)
    forms.set_rule(lambda op, device: False)
    quantize_model(plain, policy)
    ids = torch.arange(9)
    close(model(ids), plain(ids))
    assert_same_state(model, plain)
    compiled = torch.compile(model, fullgraph=True)
    close(compiled(ids), model(ids))


# -- KbitExperts ---------------------------------------------------------------------------------------------


def expert_pair(experts, bits=4):
    layer = KbitExperts.from_experts(experts, bits, kbit.QuantizationPolicy(bits=bits))
    twin = copy.deepcopy(layer)
    twin.prepare(force=True)
    return layer, twin


class HalfSiLU(nn.SiLU):
    def forward(self, x):
        return 0.5 * super().forward(x)


@pytest.mark.parametrize(
    "act_fn", [nn.SiLU(), F.silu, nn.GELU(), HalfSiLU()], ids=["SiLU", "silu", "GELU", "half SiLU"]
)
@pytest.mark.parametrize("extra", [0, 1], ids=["all mine", "some not mine"])
def test_prepared_experts(extra, act_fn):
    experts = Experts()
    experts._modules.pop("act_fn")
    experts.act_fn = act_fn
    layer, twin = expert_pair(experts)
    assert held(twin) == {"gate_up_proj_tiled", "down_proj_tiled"}
    inputs = routed(extra=extra)
    close(twin(*inputs), layer(*inputs))
    close(twin(*inputs), decoded(twin, experts)(*inputs))
    assert_same_state(twin, layer)
    x = inputs[0].clone().requires_grad_()
    close(twin(x, *inputs[1:]), layer(*inputs))
    twin(x, *inputs[1:]).sum().backward()
    other = inputs[0].clone().requires_grad_()
    layer(other, *inputs[1:]).sum().backward()
    close(x.grad, other.grad)


def test_prepared_experts_with_factors_of_their_own():
    experts = Experts(intermediate=20)  # 20 rows are no whole tiles, so gate and up are tiled apart
    plain, prepared = expert_pair(experts)
    with torch.no_grad():
        experts.gate_up_proj[1, :20] *= 2000
        experts.gate_up_proj[3, 20:] *= 2.0**-14
    layer, twin = expert_pair(experts)
    assert twin.gate_up_proj_scale.shape == (6, 2)
    inputs = routed()
    torch.testing.assert_close(twin(*inputs), layer(*inputs), rtol=1e-4, atol=1e-3)
    assert torch.equal(twin.dequantize("gate_up_proj"), layer.dequantize("gate_up_proj"))
    assert_same_state(twin, layer)
    for one, other in ((prepared, layer), (prepared, plain), (twin, plain)):
        one.load_state_dict(other.state_dict())
        assert held(one) >= {"gate_up_proj_tiled", "down_proj_tiled"}
        assert_same_state(one, other)
        torch.testing.assert_close(one(*inputs), other(*inputs), rtol=1e-4, atol=1e-3)


def test_prepared_experts_compile_whole():
    _, twin = expert_pair(Experts())
    compiled = torch.compile(twin, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        inputs = routed(tokens=tokens)
        torch.testing.assert_close(compiled(*inputs), twin(*inputs), rtol=1e-5, atol=1e-5)


# -- transformers --------------------------------------------------------------------------------------------

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_transformers_load_prepared_and_save_canonical(architecture, tmp_path, tiles_pay):
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    build(architecture, torch.float32).save_pretrained(tmp_path / "source")
    config = kbit.KbitConfig(bits=4, embedding_bits=5)
    model = load(tmp_path / "source", quantization_config=config)
    prepared = [n for n, p in model.named_parameters() if n.endswith("_tiled")]
    assert prepared
    model.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert [n for n, p in again.named_parameters() if n.endswith("_tiled")] == prepared
    forms.set_rule(lambda op, device: False)
    plain = load(tmp_path / "saved")
    assert_same_state(model, plain)
    assert_same_state(again, plain)
    assert model.dtype == plain.dtype
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, plain(IDS).logits, rtol=1e-3, atol=1e-3)
        tokens = again.generate(IDS, max_new_tokens=3, do_sample=False)
    assert tokens.shape == (2, 8)
