"""dequantize_model: the layers that it gives back, of plain PyTorch models and of transformers' models."""

import copy
import gc
import weakref

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from torch import nn

import kbit
from kbit.format.model_files import read_index
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import KbitExperts, KbitLinear, QuantizedModule, dequantize_model, quantize_model
from kbit.nn.mixins import MixedIn
from kbit.nvfp4.layers import NVFP4Linear, NVFP4Settings
from tiny_models import ARCHITECTURES, build

IDS = torch.arange(12).view(2, 6)


def plain(embedding_bits=4):
    model = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(50, 40, padding_idx=3),
            "inner": nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 40, bias=False)),
            "lm_head": nn.Linear(40, 50),
        }
    )
    model.lm_head.weight = model.embed_tokens.weight
    return quantize_model(model, kbit.QuantizationPolicy(embedding_bits=embedding_bits))


def run(model, ids):
    return model["lm_head"](model["inner"](model["embed_tokens"](ids)))


def layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedModule)}


def test_weights_are_what_the_codes_decode_to():
    model = plain()
    wanted, decoded = run(model, IDS), {name: layer.dequantize() for name, layer in layers(model).items()}
    bias, seen = model["lm_head"].bias, []
    assert dequantize_model(model, progress=lambda *args: seen.append(args)) is model
    assert not layers(model)
    tied_first = ("embed_tokens", "lm_head", "inner.0", "inner.2")
    assert seen == [(i + 1, 4, name) for i, name in enumerate(tied_first)]
    for name, weight in decoded.items():
        assert torch.equal(model.get_submodule(name).weight, weight), name
        assert model.get_submodule(name).weight.requires_grad
    torch.testing.assert_close(run(model, IDS), wanted)
    assert type(model["embed_tokens"]) is nn.Embedding
    assert model["embed_tokens"].padding_idx == 3
    assert type(model["lm_head"]) is nn.Linear
    assert model["lm_head"].bias is bias
    assert model["inner"][2].bias is None


def test_what_shared_codes_shares_the_weight():
    model = dequantize_model(plain())
    assert model["lm_head"].weight is model["embed_tokens"].weight
    layer = nn.Linear(32, 32)
    twice = quantize_model(nn.Sequential(layer, layer), kbit.QuantizationPolicy())
    dequantize_model(twice)
    assert twice[0] is twice[1]


def test_dtypes():
    assert dequantize_model(plain().bfloat16())["inner"][0].weight.dtype == torch.bfloat16
    model = dequantize_model(plain(), torch.float16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model["lm_head"].weight is model["embed_tokens"].weight
    assert run(model, IDS).dtype == torch.float16
    bare = quantize_model(nn.Sequential(nn.Linear(32, 8, bias=False)).half(), kbit.QuantizationPolicy())
    assert dequantize_model(bare)[0].weight.dtype == torch.float32  # nothing says another
    with pytest.raises(TypeError, match=r"a floating-point torch.dtype, got torch.int8"):
        dequantize_model(plain(), torch.int8)


def test_buffers_come_along():
    model = quantize_model(
        nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32)).bfloat16(), kbit.QuantizationPolicy()
    )
    model.register_buffer("frequencies", torch.ones(3, dtype=torch.bfloat16), persistent=False)
    model = dequantize_model(model, torch.float32)
    assert model(torch.randn(4, 64)).dtype == torch.float32
    assert model.frequencies.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_others_keep_their_dtype_behind_a_first_parameter_of_float32(dtype):
    layers = nn.Linear(64, 32).bfloat16(), nn.Bilinear(64, 64, 9).bfloat16()
    model = nn.ModuleList([nn.LayerNorm(64), *layers])
    quantize_model(model, kbit.QuantizationPolicy())
    dequantize_model(model, dtype)
    assert model[0].weight.dtype == torch.float32
    assert model[2].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == (dtype or torch.float32)


def test_layers_in_nvfp4_keep_their_factors():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    other = NVFP4Linear.from_linear(model[1], NVFP4Settings())
    model[1] = other
    kbit.quantize_model(model, kbit.QuantizationPolicy())
    dequantize_model(model, torch.bfloat16)
    assert model[1] is other
    assert other.weight_global_scale.dtype == torch.float32
    model[1].quantized("weight")


def test_parameters_of_another_dtype_than_the_model_keep_it():
    model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)).bfloat16()
    model.register_parameter("factor", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    model = dequantize_model(quantize_model(model, kbit.QuantizationPolicy()), torch.float32)
    assert [each.dtype for each in model.parameters()] == [torch.float64] + 4 * [torch.float32]


def test_codes_are_freed_layer_by_layer():
    model = quantize_model(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), kbit.QuantizationPolicy())
    codes = [weakref.ref(layer.weight_packed) for layer in model]
    alive = []

    def look(done, total, name):
        gc.collect()
        alive.append(sum(each() is not None for each in codes))

    dequantize_model(model, progress=look)
    assert alive == [2, 1, 0]  # those to come
    gc.collect()
    assert not any(each() is not None for each in codes)


def test_hooks_and_modes_stay():
    model = plain().eval()
    model["inner"][0].train()
    seen = []
    model["inner"][0].register_forward_hook(lambda module, args, y: seen.append(type(module)))
    run(dequantize_model(model), IDS)
    assert seen == [nn.Linear]
    assert (model["inner"][0].training, model["lm_head"].training) == (True, False)


def test_refusals_leave_the_model_as_it_is():
    with pytest.raises(TypeError, match="model must be an nn.Module, got str"):
        dequantize_model("folder")
    with pytest.raises(ValueError, match="this model is one layer itself. Use its method dequantize"):
        dequantize_model(KbitLinear(32, 8))
    experts = KbitExperts(2, 32, 32, nn.SiLU())
    model = nn.ModuleDict({"first": KbitLinear(32, 8), "experts": experts})
    with pytest.raises(ValueError, match="experts was not made from experts"):
        dequantize_model(model)
    assert len(layers(model)) == 2

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = KbitLinear(32, 8)

    with pytest.raises(ValueError, match=r"model.adapter is an adapter .*\(kbit.integrations.peft.merge"):
        dequantize_model(nn.ModuleDict({"model": nn.ModuleDict({"adapter": Adapter()})}))

    class Split(KbitLinear):
        pass

    with pytest.raises(ValueError, match="layer is a Split, as in models that are split over ranks"):
        dequantize_model(nn.ModuleDict({"layer": Split(32, 8)}))


class Watch(AlignDevicesHook):
    """Moves inputs to a device, as in models that accelerate has spread over several."""

    def __init__(self):
        super().__init__(execution_device=torch.device("cpu"))
        self.seen = []

    def pre_forward(self, module, *args, **kwargs):
        self.seen.append(type(module).__name__)
        return super().pre_forward(module, *args, **kwargs)


def test_hooks_of_accelerate_stay_through_both_ways():
    model, watch = build("qwen3_moe", torch.float32), Watch()
    kinds = ("Linear", "Embedding", "Experts")
    watched = [module for module in model.modules() if type(module).__name__.endswith(kinds)]
    for module in watched:
        add_hook_to_module(module, watch)
    before = model(IDS).logits
    plain, watch.seen = watch.seen, []
    wanted = kbit.quantize_model(model, kbit.KbitConfig(bits=5, embedding_bits=5))(IDS).logits
    quantized, watch.seen = watch.seen, []
    torch.testing.assert_close(model.dequantize()(IDS).logits, wanted, rtol=1e-3, atol=1e-4)
    assert watch.seen == plain
    assert len(quantized) == len(plain) == len(watched)
    assert {kind for kind in quantized if kind.startswith("Kbit")} >= {"KbitLinear", "KbitExperts"}
    assert not torch.equal(before, wanted)


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_added_to_a_quantized_model_call_the_own_forward_again(removed):
    """accelerate keeps the bound forward of what a module was when its hook came."""
    model = build("qwen3_moe", torch.float32)
    kbit.quantize_model(model, kbit.KbitConfig(bits=5))
    watched = [module for module in model.modules() if isinstance(module, MixedIn)]
    wanted, watch = model(IDS).logits, Watch()
    for module in watched:
        add_hook_to_module(module, watch)
        if removed:
            remove_hook_from_module(module)
    dequantize_model(model)
    torch.testing.assert_close(model(IDS).logits, wanted, rtol=1e-3, atol=1e-4)
    assert len(watch.seen) == (0 if removed else len(watched))
    assert any("Norm" in type(module).__name__ for module in watched)
    assert not any(isinstance(module, MixedIn) for module in model.modules())


def test_weights_elsewhere_are_refused():
    model = plain()
    model["inner"][0].to("meta")
    with pytest.raises(ValueError, match=r"the weight of inner.0 is on the meta device. Load it, or"):
        dequantize_model(model)


@pytest.mark.parametrize("by", ["transformers", "kbit"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_models_of_transformers(architecture, by, tmp_path):
    """Loaded from a quantized checkpoint or quantized in place: they save and load as any other."""
    source = build(architecture, torch.float32)
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in source.state_dict().items()}
    config = kbit.KbitConfig(bits=4, embedding_bits=4)
    if by == "kbit":
        model = kbit.quantize_model(source, config)
    else:
        source.save_pretrained(tmp_path / "source")
        quantize_checkpoint(tmp_path / "source", tmp_path / "quantized", config)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    logits = model(IDS).logits
    dequantized = kbit.dequantize_model(model) if by == "kbit" else model.dequantize()
    assert dequantized is model
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()} == wanted
    assert getattr(model.config, "quantization_config", None) is None
    torch.testing.assert_close(model(IDS).logits, logits, rtol=1e-3, atol=1e-4)
    model.save_pretrained(tmp_path / "plain")
    if by == "transformers":
        assert read_index(tmp_path / "plain").keys() == read_index(tmp_path / "source").keys()
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_experts_have_their_class_again_also_of_a_copied_model():
    source = build("qwen3_moe", torch.float32)
    kinds = {name: type(module) for name, module in source.named_modules()}
    model = copy.deepcopy(kbit.quantize_model(source, kbit.KbitConfig(bits=5)))
    assert {name: type(module) for name, module in model.dequantize().named_modules()} == kinds
    assert layers(source)  # the copy alone


def test_a_model_in_double_precision():
    model = kbit.quantize_model(nn.Sequential(nn.Linear(64, 64)), kbit.QuantizationPolicy())
    expected = model[0].dequantize(torch.float32).double()
    plain = kbit.dequantize_model(model.double())
    assert torch.equal(plain[0].weight, expected)
    assert plain[0].bias.dtype == torch.float64


def test_tied_layers_are_replaced_together():
    """Whoever stops it in between, and goes on, has one weight for both as well."""
    model, seen = plain(), []

    def stop(done, total, name):
        seen.append((done, total, name))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dequantize_model(model, progress=stop)
    assert seen == [(1, 4, "embed_tokens")]
    dequantize_model(model)
    assert model.lm_head.weight is model.embed_tokens.weight
