"""quantize_model: what it leaves alone and says about it, and what a replaced layer keeps."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from torch import nn
from torch.nn.utils import prune
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import kbit
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, quantize_model
from kbit.nvfp4.layers import NVFP4Linear, NVFP4Module, NVFP4Settings, replace_layers

IN_PLACE = pytest.mark.parametrize(
    "quantize",
    [
        lambda model: quantize_model(model, kbit.QuantizationPolicy()),
        lambda model: replace_layers(model, NVFP4Settings(activations="16bit"), lambda name: bool(name)),
    ],
    ids=["k bits", "NVFP4"],
)


@pytest.mark.parametrize("tied_to", ["skipped", "unsupported"])
def test_the_reason_names_who_holds_a_tied_weight(tied_to):
    class Scaled(nn.Embedding):
        pass

    table = (nn.Embedding if tied_to == "skipped" else Scaled)(1000, 1000)
    model = nn.ModuleDict({"embed_tokens": table, "lm_head": nn.Linear(1000, 1000)})
    model.lm_head.weight = model.embed_tokens.weight
    policy = kbit.QuantizationPolicy(embedding_bits=4, overrides={"embed_tokens": 4 * (tied_to != "skipped")})
    told = {"skipped": "the override 'embed_tokens' is 0", "unsupported": "Scaled is not nn.Linear"}[tied_to]
    with pytest.warns(UserWarning, match=f"lm_head.weight: it shares its weight with embed_tokens: {told}"):
        quantize_model(model, policy)


def test_layers_of_which_torch_reads_the_weight_stay():
    block = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoder(block, 2)).eval()
    quantize_model(model, kbit.QuantizationPolicy())
    assert [n for n, m in model.named_modules() if isinstance(m, KbitLinear)] == ["0"]
    with torch.no_grad():
        assert model(torch.randn(2, 5, 32)).isfinite().all()


@IN_PLACE
def test_layers_that_state_other_sizes_than_their_weight_has_stay(quantize):
    """(6, 41) has as many blocks as (6, 40): by what the layer states, a column was lost in silence."""
    model = nn.ModuleList([nn.Linear(40, 6), nn.Linear(40, 6), nn.Linear(40, 6)])
    model[0].weight = nn.Parameter(torch.randn(6, 41))
    model[1].weight, model[1].bias = nn.Parameter(torch.randn(3, 40)), None
    quantize(model)
    assert [type(layer) is nn.Linear for layer in model] == [True, True, False]
    assert model[0](torch.randn(2, 41)).shape == (2, 6)


def test_a_layer_that_states_other_sizes_is_refused_by_name():
    linear, table = nn.Linear(40, 6), nn.Embedding(6, 40)
    linear.weight, table.weight = nn.Parameter(torch.randn(6, 41)), nn.Parameter(torch.randn(7, 40))
    told = r"from_\w+: its weight is \({}\), its sizes say \(6, 40\) \(up\). Set"
    with pytest.raises(ValueError, match=told.format("6, 41")):
        KbitLinear.from_linear(linear, name="up")
    with pytest.raises(ValueError, match=told.format("6, 41")):
        NVFP4Linear.from_linear(linear, NVFP4Settings(), "up")
    with pytest.raises(ValueError, match=told.format("7, 40")):
        KbitEmbedding.from_embedding(table, name="up")


def test_a_lazy_layer_alone_is_refused():
    with pytest.raises(ValueError, match=r"KbitLinear.from_linear: a lazy layer has no sizes .*Call it once"):
        KbitLinear.from_linear(nn.LazyLinear(4), name="up")


def test_lazy_layers_stay():
    model = nn.Sequential(nn.Linear(40, 32), nn.LazyLinear(8))
    quantize_model(model, kbit.QuantizationPolicy())
    assert isinstance(model[0], KbitLinear)
    assert model(torch.randn(2, 40)).shape == (2, 8)


@IN_PLACE
def test_hooks_of_accelerate_stay(quantize):
    model, seen = nn.Sequential(nn.Linear(32, 32)), []

    class Watch(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(type(module))
            return super().pre_forward(module, *args, **kwargs)

    add_hook_to_module(model[0], Watch(execution_device=torch.device("cpu")))
    quantize(model)
    model(torch.randn(3, 32))
    assert seen == [type(model[0])]
    assert isinstance(model[0], KbitLinear | NVFP4Module)


@IN_PLACE
@pytest.mark.parametrize("hooked", [False, True])
def test_a_forward_of_its_own_stays(quantize, hooked):
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    own = model[0].forward
    model[0].forward = lambda x: 10 * own(x)
    if hooked:
        add_hook_to_module(model[0], AlignDevicesHook(execution_device=torch.device("cpu")))
    want = 10 * own(x)
    quantize(model)
    assert type(model[0]) is nn.Linear
    assert torch.equal(model[0](x), want)


@torch.inference_mode()
def quantized_for_inference(module):
    return quantize_model(module, kbit.QuantizationPolicy())


def test_models_quantized_in_inference_mode_can_be_trained():
    model = quantized_for_inference(nn.Sequential(nn.Linear(32, 64)))
    x = torch.randn(3, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.any()


@IN_PLACE
def test_hooks_on_calls_stay_and_can_be_removed(quantize):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    seen = []
    handles = [
        model[0].register_forward_pre_hook(lambda module, args: seen.append("before")),
        model[0].register_forward_hook(
            lambda module, args, kwargs, y: seen.append(type(module)), with_kwargs=True
        ),
        model[1].register_full_backward_hook(lambda module, grad_x, grad_y: seen.append("backward")),
    ]
    quantize(model)
    x = torch.randn(3, 32, requires_grad=True)
    model(x).sum().backward()
    assert seen == ["before", type(model[0]), "backward"]
    assert isinstance(model[0], KbitLinear | NVFP4Module)
    for handle in handles:
        handle.remove()
    model(x)
    assert len(seen) == 3


@IN_PLACE
def test_what_hooks_read_of_a_layer_stays(quantize):
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].gain = 2.0
    model[0].register_forward_hook(lambda module, given, result: result * module.gain)
    quantize(model)
    assert type(model[0]) is not nn.Linear
    single, x = copy.deepcopy(model), torch.randn(2, 64)
    single[0].gain = 1.0
    torch.testing.assert_close(model(x), 2 * single(x))


def test_what_hooks_read_comes_back_with_plain_layers():
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(64, 64))
    usual = [{*vars(layer), "_is_hf_initialized"} for layer in model]
    for layer in model:
        layer.gain, layer.bits = 2.0, 16
    quantize_model(model, kbit.QuantizationPolicy(bits=4, overrides={"1": 4}))
    assert [(type(layer), layer.bits) for layer in model] == [(KbitLinear, 4), (KbitEmbedding, 4)]
    model[1].gain = 3.0
    kbit.dequantize_model(copy.deepcopy(model))
    kbit.dequantize_model(model)
    assert [(layer.gain, layer.bits) for layer in model] == [(2.0, 16), (3.0, 16)]
    assert [set(vars(layer)) - {"gain", "bits"} for layer in model] == usual


@pytest.mark.parametrize(
    "register", ["register_state_dict_post_hook", "register_load_state_dict_post_hook"], ids=str
)
def test_a_layer_with_hooks_on_its_state_dict_stays(register):
    """They are for a weight that a quantized one has not."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(64, 64))
    getattr(model[0], register)(lambda *_: None)
    with pytest.warns(UserWarning, match="0.weight: it has hooks on its state dict"):
        kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    assert [type(layer) for layer in model] == [nn.Linear, kbit.nn.KbitLinear]


def test_a_layer_whose_weight_a_hook_computes_stays():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(1024, 1024))
    prune.l1_unstructured(model[1], "weight", 0.5)
    with pytest.warns(UserWarning, match=r"1\.weight_orig: a hook computes its weight at every call"):
        quantize_model(model, kbit.QuantizationPolicy())
    assert [type(layer) for layer in model] == [KbitLinear, nn.Linear]


@IN_PLACE
def test_layers_without_rows_and_those_whose_weight_others_hold_stay(quantize):
    class Scaled(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

    plain, empty, tied = (nn.Linear(32, rows) for rows in (16, 0, 16))
    model = nn.ModuleDict({"plain": plain, "empty": empty, "tied": tied, "other": Scaled(tied.weight)})
    quantize(model)
    assert model.plain is not plain
    assert model.empty is empty
    assert model.tied is tied


@IN_PLACE
def test_layers_with_a_forward_of_their_own_or_without_a_weight_stay(quantize):
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    model[0].forward = lambda x: 2 * nn.Linear.forward(model[0], x)
    model[1].forward = model[1].forward  # as accelerate leaves it
    x = torch.ones(1, 32)
    doubled = model[0](x)
    model[2].weight = None
    quantize(model)
    assert [type(layer) is nn.Linear for layer in model] == [True, False, True, False]
    assert torch.equal(model[0](x), doubled)


class Subclassed(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_own_forward(layer):
    layer.forward = lambda *given: 2 * type(layer).forward(layer, *given)
    return layer


def test_layers_are_not_made_of_what_computes_more():
    refusal = r"takes what computes as nn.{} does, got {} with a forward of its own \(wte\)"
    for linear in (Doubled(64, 8), with_own_forward(nn.Linear(64, 8))):
        with pytest.raises(TypeError, match=refusal.format("Linear", type(linear).__name__)):
            KbitLinear.from_linear(linear, name="wte")
    scaled = Gemma3TextScaledWordEmbedding(8, 64, padding_idx=0, embed_scale=8.0)
    for table in (scaled, with_own_forward(nn.Embedding(8, 64))):
        with pytest.raises(TypeError, match=refusal.format("Embedding", type(table).__name__)):
            KbitEmbedding.from_embedding(table, name="wte")
    # Neither a hook of accelerate nor a computed weight is such a forward.
    KbitLinear.from_linear(add_hook_to_module(nn.Linear(64, 8), ModelHook()))
    KbitLinear.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)))
    KbitLinear.from_linear(nn.MultiheadAttention(64, 2).out_proj)


def test_layers_are_made_of_unquantized_ones_of_their_kind():
    quantized = KbitLinear.from_linear(Subclassed(64, 8))
    for wrong in (quantized, nn.Embedding(8, 64), torch.ones(8, 64)):
        with pytest.raises(TypeError, match=rf"nn.Linear, got {type(wrong).__name__} \(layers\.0\)"):
            KbitLinear.from_linear(wrong, name="layers.0")
    table = KbitEmbedding.from_embedding(nn.Embedding(8, 64))
    for wrong in (table, nn.Linear(64, 8)):
        with pytest.raises(TypeError, match=rf"nn.Embedding, got {type(wrong).__name__}\."):
            KbitEmbedding.from_embedding(wrong)
    for sizes in ((0, 8), (-1, 8), (8, -1)):
        with pytest.raises(
            ValueError, match=r"KbitLinear: in-features must be at least 1 .* got .* \(layers\.0\)"
        ):
            KbitLinear(*sizes, name="layers.0")


@pytest.mark.parametrize("wrong", [None, [1.0]])
def test_layers_name_what_is_no_tensor(wrong):
    linear = KbitLinear(64, 8, name="layers.0")
    with pytest.raises(TypeError, match=r"linear: x must be a tensor, got .* \(layers\.0\)"):
        linear(wrong)
    table = KbitEmbedding(8, 64, name="layers.0")
    with pytest.raises(TypeError, match=r"embedding: ids must be a tensor, got .* \(layers\.0\)"):
        table(wrong)
    experts = KbitExperts(2, 64, 32, nn.SiLU(), name="layers.0")
    x = torch.ones(1, 64)
    for arguments, name in (((wrong, x, x), "hidden_states"), ((x, wrong, x), "top_k_index")):
        with pytest.raises(TypeError, match=rf"experts: {name} must be a tensor, got .* \(layers\.0\)"):
            experts(*arguments)


def test_no_experts_decode_to_nothing():
    layer = KbitExperts(0, 40, 24, nn.SiLU())
    assert layer.dequantize("gate_up_proj").shape == (0, 48, 40)


def test_a_refusals_for_other_bits_says_that_it_changes_nothing(recwarn):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_model(quantize_model(model, kbit.QuantizationPolicy(bits=4)), kbit.QuantizationPolicy(bits=4))
    assert not recwarn
    with pytest.warns(UserWarning, match=r"2 layers keep what they have, such as 0 \(4 bits\)") as told:
        quantize_model(model, kbit.QuantizationPolicy(bits=3))
    assert {one.filename for one in told} == {__file__}  # the caller's line
    levels = [-1.0, *(step / 16 for step in range(-7, 7)), 1.0]
    for settings, what in (
        ({"codebook": levels}, "another codebook"),
        ({"absmax_format": "float16"}, "absmax_format e4m4"),
    ):
        with pytest.warns(UserWarning, match=rf"2 layers keep what they have, such as 0 \({what}\)"):
            quantize_model(model, kbit.QuantizationPolicy(bits=4, **settings))
    model.append(nn.Linear(32, 32))
    quantize_model(model, kbit.QuantizationPolicy(bits=3))
    assert not recwarn
    assert [layer.bits for layer in model] == [4, 4, 3]


def test_a_width_of_embeddings_that_no_module_has_is_reported():
    class Table(nn.Embedding):
        pass

    model = nn.ModuleDict({"embed_tokens": Table(64, 64), "fc": nn.Linear(64, 64)})
    message = r"no module for embedding_bits=5 \(embed_tokens has no weight that can be quantized\)"
    with pytest.warns(UserWarning, match=message):
        kbit.quantize_model(model, kbit.QuantizationPolicy(embedding_bits=5))


class ReadsItsLayer(nn.Module):
    """Adds what it finds in its layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        more = getattr(self.layer, "more", None)
        return self.layer(x) if more is None else self.layer(x) + more


@pytest.mark.parametrize("kind", ["parameter", "buffer", "module", "bias"])
def test_a_layer_that_holds_more_than_its_weights_stays(kind):
    model = nn.Sequential(nn.Linear(64, 64), ReadsItsLayer())
    layer = model[1].layer
    if kind == "parameter":
        layer.more = nn.Parameter(torch.ones(64))
    elif kind == "buffer":
        layer.register_buffer("more", torch.ones(64))
    elif kind == "module":
        layer.adapter = nn.Linear(64, 64)
        layer.register_forward_hook(lambda module, given, result: result + module.adapter(given[0]))
    else:
        bias = layer.bias.detach()
        del layer.bias
        layer.bias = bias
    names = {name for name in model.state_dict() if "adapter" not in name}  # a layer like others
    quantize_model(model, kbit.QuantizationPolicy(bits=5))
    assert isinstance(model[0], KbitLinear)
    assert type(model[1].layer) is nn.Linear
    assert {name for name in names if name.startswith("1.")} <= set(model.state_dict())
    model(torch.randn(3, 64))


def test_nothing_is_computed_of_layers_that_stay():
    """The weight of a parametrized layer is computed when it is asked for; this kind changes itself then."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64))
    model = nn.Sequential(layer, nn.Linear(64, 64))
    before = layer.parametrizations.weight[0]._u.clone()
    quantize_model(model, kbit.QuantizationPolicy())
    assert torch.equal(layer.parametrizations.weight[0]._u, before)


def test_quantizing_again_says_nothing(recwarn):
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(50, 64), "up": nn.Linear(64, 64)})
    policy = kbit.QuantizationPolicy(embedding_bits=5, overrides={"up$": 3})
    quantize_model(quantize_model(model, policy), policy)
    assert not recwarn.list


def test_weights_of_quantized_layers_are_not_set():
    table, layer = (
        KbitEmbedding.from_embedding(nn.Embedding(50, 64)),
        KbitLinear.from_linear(nn.Linear(64, 8)),
    )
    for module in (table, layer):
        with pytest.raises(TypeError, match=r"weight cannot be replaced, .* Put a layer in its place"):
            module.weight = nn.Parameter(torch.zeros(50, 64))
        assert isinstance(module.weight, torch.Tensor)
    with pytest.raises(TypeError, match=r"use KbitEmbedding\.from_embedding"):
        KbitEmbedding.from_pretrained(torch.zeros(50, 64))
