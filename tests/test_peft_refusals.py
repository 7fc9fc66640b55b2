"""What peft cannot do on quantized layers is refused by name before anything changes; what merging leaves."""

import copy
import re
import warnings

import pytest
import torch
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    ArrowConfig,
    IA3Config,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    UniLoraConfig,
    VeraConfig,
    create_arrow_model,
    get_peft_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

import kbit
from kbit.integrations.peft import merge
from kbit.integrations.transformers.parallel_layers import ParallelEmbedding, ParallelLinear, Split
from kbit.nn import KbitLinear
from kbit.nn.replace import quantize_model
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])


def quantized(architecture="llama", **config):
    return quantize_model(build(architecture, torch.float32, False), kbit.KbitConfig(bits=4, **config))


def lora(**options):
    return LoraConfig(**({"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | options))


def adapted(model, **options):
    torch.manual_seed(1)
    return get_peft_model(model, lora(**options))


def adapters(model):
    return {name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


# Adapters that peft itself merges into no weight.


def test_adapters_of_some_tokens_are_not_merged():
    model = adapted(quantized(), alora_invocation_tokens=[9], task_type="CAUSAL_LM")
    layers = adapters(model)
    with pytest.raises(
        ValueError, match=r"q_proj: adapter 'default' is .* ALoraLinearVariant.* Keep it beside"
    ):
        merge(model)
    assert adapters(model) == layers


def test_routed_adapters_are_not_merged(tmp_path):
    for name in ("first", "second"):
        adapted(quantized()).save_pretrained(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("first", "second")]
    model = create_arrow_model(quantized(), paths, arrow_config=ArrowConfig(top_k=1))
    with pytest.raises(ValueError, match=r"q_proj: adapter 'arrow_router' is of the kind ArrowLinearVariant"):
        merge(model)


def test_adapters_of_some_tokens_on_16_bit_layers_leave_quantized_ones_unmerged():
    model = adapted(quantized("qwen3"))
    model.add_adapter("some", lora(target_modules=["lm_head"], alora_invocation_tokens=[9]))
    model.base_model.set_adapter(["default", "some"])
    layers = adapters(model)
    with pytest.raises(ValueError, match=r"lm_head: adapter 'some' is of the kind ALoraLinearVariant"):
        merge(model)
    assert adapters(model) == layers


def test_dora_on_16_bit_layers_is_merged():
    model = adapted(quantized("qwen3"), target_modules=["lm_head"], use_dora=True)
    expected = model(IDS).logits
    torch.testing.assert_close(merge(model)(IDS).logits, expected)


# Merging: what it is given, and what it leaves alone.


@pytest.mark.parametrize("requantize", ["no", None, 4])
def test_merging_takes_a_flag(requantize):
    model = adapted(quantized())
    with pytest.raises(TypeError, match=rf"merge: requantize must be True or False, got {requantize!r}"):
        merge(model, requantize=requantize)
    assert adapters(model)


def test_mixed_models_are_not_merged():
    model = get_peft_model(quantized(), lora(), mixed=True)
    with pytest.raises(
        TypeError, match=r"PeftMixedModel may hold adapters of several kinds.* without mixed=True"
    ):
        merge(model)


@pytest.mark.parametrize("requantize", [True, False])
def test_adapters_with_nan_are_named_and_nothing_is_merged(requantize):
    model = adapted(quantized())
    layers = adapters(model)
    broken = model.get_base_model().model.layers[1].self_attn.q_proj
    broken.lora_A["default"].weight.data[0, :2] = float("nan")
    with pytest.raises(
        ValueError, match=r"1\.self_attn\.q_proj: adapter 'default' holds 2 NaN or Inf values"
    ) as e:
        merge(model, requantize)
    assert "modules_to_not_convert" not in str(e.value)
    assert adapters(model) == layers


@pytest.mark.parametrize("requantize", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_models_that_are_none_of_transformers_are_merged(requantize, bias):
    host = nn.Sequential(KbitLinear.from_linear(nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16), bits=4))
    model = adapted(host, target_modules=["0"])
    x = torch.randn(2, 64)
    expected = model(x)
    merged = merge(model, requantize)
    if requantize:
        assert (merged(x) - expected).norm() < 0.3 * expected.norm()
    else:
        assert merged[0].weight.dtype == (torch.bfloat16 if bias else torch.float32)
        y = merged(x.to(merged[0].weight.dtype)).float()
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.05 if bias else 1e-4)


@pytest.mark.parametrize("requantize", [True, False])
def test_layers_of_inactive_adapters_stay_as_they_are(requantize):
    base = quantized("qwen3_moe", embedding_bits=4)
    # The adapter of each could not be merged, or not to 16 bits.
    names = ["model.embed_tokens", "model.layers.0.mlp.experts", "model.layers.0.self_attn.v_proj"]
    before = {name: base.get_submodule(name) for name in names}
    state = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    model = adapted(base, target_modules=["q_proj"])
    model.add_adapter("idle", lora(target_modules=["embed_tokens", "experts"]))
    model.add_adapter("biased", lora(target_modules=["v_proj"], lora_bias=True))
    expected = model(IDS).logits
    merged = merge(model, requantize)
    for name, layer in before.items():
        assert merged.get_submodule(name) is layer
        assert all(torch.equal(t, state[f"{name}.{key}"]) for key, t in layer.state_dict().items())
    assert not adapters(merged)
    if not requantize:
        torch.testing.assert_close(merged(IDS).logits, expected)
        left_out = merged.config.quantization_config.modules_to_not_convert
        assert [name.rpartition(".")[2] for name in left_out] == ["q_proj", "q_proj"]


@pytest.mark.parametrize("requantize", [True, False])
def test_what_is_merged_in_inference_mode_can_be_trained(requantize):
    model = adapted(quantized(), target_modules=["q_proj", "down_proj"])
    with torch.inference_mode():
        merged = merge(model, requantize)
    assert not any(tensor.is_inference() for tensor in merged.state_dict().values())
    again = adapted(merged, target_modules=["k_proj"])
    again(IDS, labels=IDS).loss.backward()
    assert all(one.grad is not None for one in again.parameters() if one.requires_grad)


# Tuners.


@pytest.mark.parametrize("options", [{}, {"save_indices": True}], ids=str)
def test_unilora_trains_as_on_16_bits(tmp_path, options):
    base = quantized()
    grads, logits = [], []
    for model in (base, kbit.dequantize_model(copy.deepcopy(base))):
        torch.manual_seed(2)
        model = get_peft_model(model, UniLoraConfig(target_modules=["q_proj", "down_proj"], **options))
        out = model(input_ids=IDS, labels=IDS)
        out.loss.backward()
        (trained,) = {one for one in model.parameters() if one.requires_grad}
        grads.append(trained.grad)
        logits.append(out.logits)
        if not grads[1:]:
            model.save_pretrained(tmp_path)
    assert grads[1].abs().max() > 1e-4
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(logits[0], logits[1])
    again = PeftModel.from_pretrained(quantized(), tmp_path)
    torch.testing.assert_close(again(input_ids=IDS).logits, logits[0])


@pytest.mark.parametrize(
    "config",
    [
        lora(),
        lora(target_modules="all-linear"),
        lora(target_modules=r".*\.q_proj"),
        lora(target_modules=None),
        IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        VeraConfig(r=4),
        OFTConfig(target_modules=["q_proj"], oft_block_size=4, r=0),
        AdaLoraConfig(target_modules=["q_proj"], total_step=5),
        MissConfig(target_modules=["q_proj"], r=4),
        AdaptionPromptConfig(adapter_len=3, adapter_layers=2, task_type="CAUSAL_LM"),
    ],
    ids=lambda config: f"{type(config).__name__} {getattr(config, 'target_modules', '')}",
)
def test_layers_split_over_ranks_get_no_adapter(config):
    model = quantized()
    split = model.model.layers[1].self_attn.q_proj  # those in front of it are whole
    split.__class__, split.split = ParallelLinear, Split(mesh=None)
    kinds = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.q_proj is split over ranks.*without tp_plan"
    ):
        get_peft_model(model, config)
    assert {name: type(module) for name, module in model.named_modules()} == kinds


def test_whole_layers_beside_split_ones_get_adapters():
    model = quantized()
    split = model.model.layers[1].self_attn.q_proj
    split.__class__, split.split = ParallelLinear, Split(mesh=None)
    assert len(adapters(adapted(model, layers_to_transform=[0]))) == 1


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_split_tables_get_no_prompts(kind):
    model = quantized(embedding_bits=4)
    table = model.model.embed_tokens
    table.__class__, table.split = ParallelEmbedding, Split(mesh=None)
    with pytest.raises(ValueError, match="embed_tokens is split over ranks; adapters and prompts train on"):
        get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=3))


@pytest.mark.parametrize(
    "config",
    [
        lora(modules_to_save=["mlp"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, modules_to_save=["mlp"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_modules_that_hold_codes_are_not_trained(config):
    model = quantized()
    with pytest.raises(ValueError, match=r"modules_to_save: \S+\.0\.mlp holds gate_proj, which is quantized"):
        get_peft_model(model, config)
    assert not adapters(model)


def test_layers_with_adapters_are_not_trained_themselves():
    model = adapted(quantized())
    with pytest.raises(ValueError, match=r"modules_to_save: \S+q_proj is quantized.*\{'q_proj\$': 0\}"):
        model.add_adapter("other", lora(target_modules=["k_proj"], modules_to_save=["q_proj"]))


def test_what_needs_16_bits_is_refused_before_anything_is_adapted():
    model = quantized(overrides={r"layers\.0": 0})
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.q_proj: use_dora is not possible"):
        adapted(model, use_dora=True)
    assert not adapters(model)


# Experts.

EXPERTS = {"target_modules": ["q_proj", "experts"]}


@pytest.mark.parametrize("option", [{"alora_invocation_tokens": [9]}, {"arrow_config": ArrowConfig()}])
def test_adapters_of_experts_do_not_depend_on_tokens(option):
    model, (name,) = quantized("qwen3_moe"), option
    with pytest.raises(ValueError, match=rf"experts: {name} is not possible on fused.* Adapt linear layers"):
        adapted(model, **EXPERTS, **option)
    assert not adapters(model)


@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_adapters_of_experts_are_not_called_as_their_parameters(name):
    model = quantized("qwen3_moe")
    with pytest.raises(ValueError, match=rf"experts: an adapter .* called '{name}'.* another adapter_name"):
        get_peft_model(model, lora(**EXPERTS), adapter_name=name)
    assert not adapters(model)
    get_peft_model(model, lora(), adapter_name=name)  # of linear layers they may be


def test_adapters_of_experts_are_not_added_up():
    model = adapted(quantized("qwen3_moe"), **EXPERTS)
    model.add_adapter("other", lora(**EXPERTS))
    model.add_adapter("linear", lora())
    expected = model(IDS).logits
    with pytest.raises(NotImplementedError, match=r"experts: add_weighted_adapter .* 'other' adapts these"):
        model.add_weighted_adapter(["linear", "other"], [0.5, 0.5], "sum", combination_type="linear")
    assert set(model.peft_config) == {"default", "other", "linear"}
    assert not any(".sum" in name for name, _ in model.named_parameters())
    assert torch.equal(model(IDS).logits, expected)
    model.add_adapter("more", lora())
    model.add_weighted_adapter(["linear", "more"], [0.5, 0.5], "sum", combination_type="linear")
    model.set_adapter("sum")
    assert not torch.equal(model(IDS).logits, expected)


REGEX = r".*\.(q_proj|gate_proj|up_proj|down_proj)"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "mlp.experts.gate_up_proj"),
        ({"target_parameters": ["layers.0.mlp.experts.down_proj"]}, "layers.0.mlp.experts.down_proj"),
        ({"target_modules": REGEX}, REGEX),
        ({"target_modules": ["q_proj", "experts.gate_proj", "experts.up_proj"]}, "experts.up_proj"),
    ],
    ids=str,
)
def test_targets_that_spell_out_experts_say_that_none_are_adapted(options, said):
    pattern = rf"{re.escape(said)} adapt no quantized experts.*: model\.layers\.0\.mlp\.experts\. Put"
    with pytest.warns(UserWarning, match=pattern):
        adapted(quantized("qwen3_moe"), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*\.(q_proj|down_proj|up_proj|gate_proj|experts)"},
        {"target_modules": r".*self_attn\.(q|k|v|o)_proj"},
        {"target_modules": ["mlp.experts", "down_proj", "up_proj", "gate_proj"]},
        {"target_parameters": ["mlp.gate.weight"]},
    ],
    ids=str,
)
def test_targets_that_reach_experts_or_want_none_say_nothing(options):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapt no quantized experts")
        model = adapted(quantized("qwen3_moe"), **options)
        model.add_adapter("other", lora(**options))
