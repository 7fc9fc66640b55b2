"""Models in wrappers: torch.compile's is looked through, those of data parallelism are refused."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import kbit
from kbit.integrations.transformers.own_methods import generating, is_ours
from kbit.nn import KbitLinear
from tiny_models import build

IDS = torch.arange(3, 15).view(1, 12)


@pytest.fixture
def model(own_compilations):
    return build("llama", torch.float32)


def compiled(model):
    return torch.compile(model, backend="eager")


def in_inference(model):
    with torch.inference_mode():
        return model(IDS).logits


def test_a_compiled_model_is_quantized_by_its_names_and_back(model, recwarn, tmp_path):
    wrapper = compiled(model)
    before = in_inference(wrapper)
    skips = ["lm_head", "model.layers.1"]
    policy = kbit.KbitConfig(overrides={r"^model\.layers\.0\.mlp": 0}, modules_to_not_convert=skips)
    assert kbit.quantize_model(wrapper, policy, calibration=[IDS]) is wrapper
    assert not [str(each.message) for each in recwarn if "kbit" in str(each.message)]
    quantized = {name for name, layer in model.named_modules() if isinstance(layer, KbitLinear)}
    assert quantized == {f"model.layers.0.self_attn.{one}_proj" for one in "qkvo"}
    after = in_inference(wrapper)
    assert torch.equal(after, in_inference(model))
    assert not torch.equal(after, before)
    with pytest.raises(ValueError, match="half"):  # transformers knows
        model.half()
    wrapper.save_pretrained(tmp_path)
    assert torch.equal(in_inference(type(model).from_pretrained(tmp_path)), after)
    assert kbit.dequantize_model(wrapper) is wrapper
    assert not hasattr(model.config, "quantization_config")
    model.half()


@pytest.mark.parametrize(
    ("enable", "disable"),
    [
        (kbit.enable_prefix_caching, kbit.disable_prefix_caching),
        (kbit.enable_cuda_graphs, kbit.disable_cuda_graphs),
    ],
)
def test_a_compiled_model_generates_as_the_one_inside(model, enable, disable):
    wrapper = compiled(model)
    how = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    model.generation_config.disable_compile = True
    wanted = wrapper.generate(IDS, **how)
    enable(wrapper)
    assert any(map(is_ours, vars(model).values()))
    for each in (wrapper, model):
        assert torch.equal(each.generate(IDS, **how), wanted)
    disable(wrapper)
    assert not any(map(is_ours, vars(model).values()))
    assert torch.equal(wrapper.generate(IDS, **how), wanted)


def test_wrappers_in_wrappers(model):
    assert generating(compiled(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))) is model
    twin = build("llama", torch.float32)
    assert generating(get_peft_model(compiled(twin), LoraConfig(target_modules=["q_proj"]))) is twin


@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("wrap", [compiled, lambda model: model])
def test_models_in_data_parallelism_are_refused(kind, wrap, own_compilations):
    parallel = kind.__new__(kind)  # without a group of processes
    nn.Module.__init__(parallel)
    parallel.module = nn.Sequential(nn.Linear(32, 32))
    wrapper = wrap(parallel)
    refusal = rf"model: model must be the one inside, got {kind.__name__}. Call \w+ with its .module first"
    with pytest.raises(TypeError, match="quantize_" + refusal):
        kbit.quantize_model(wrapper, kbit.QuantizationPolicy())
    with pytest.raises(TypeError, match="dequantize_" + refusal):
        kbit.dequantize_model(wrapper)
    assert type(parallel.module[0]) is nn.Linear
