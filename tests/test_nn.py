"""Layers: values, state dicts, casts, ties, experts, and quantize_model on plain PyTorch models."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kbit
from kbit.format import ABSMAX_FORMATS, SUPPORTED_BITS
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, QuantizedModule, quantize_model

PARTS = ("weight_packed", "weight_absmax", "weight_scale", "codebook")


def tiny_weights(linear):
    """Give some blocks magnitudes below E4M4's range, so that the matrix gets a factor."""
    with torch.no_grad():
        linear.weight.mul_(2.0**-12)
    return linear


# -- KbitLinear ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absmax_format", ABSMAX_FORMATS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_linear_is_kbit_linear_of_the_quantized_weight(bits, absmax_format):
    linear = nn.Linear(100, 17)
    layer = KbitLinear.from_linear(linear, bits=bits, absmax_format=absmax_format)
    q = kbit.quantize(linear.weight.detach(), bits, scale=absmax_format)
    x = torch.randn(2, 3, 100)
    assert torch.equal(layer(x), kbit.linear(x, q, linear.bias))
    assert layer.bias is linear.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_hot_rows_return_the_decoded_weight(dtype):
    layer = KbitLinear.from_linear(nn.Linear(40, 9, bias=False), bits=3)
    assert torch.equal(layer(torch.eye(40, dtype=dtype)).T, layer.dequantize(dtype))


def test_linear_looks_like_a_linear():
    layer = KbitLinear.from_linear(nn.Linear(100, 17), bits=3)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (100, 17)
    assert layer.weight is layer.weight_packed
    assert "bits=3" in repr(layer)
    assert "in_features=100" in repr(layer)
    assert layer(torch.zeros(0, 100)).shape == (0, 17)


@pytest.mark.parametrize("scaled", [False, True])
def test_linear_state_dict_round_trip(scaled):
    source = nn.Linear(64, 8)
    layer = KbitLinear.from_linear(tiny_weights(source) if scaled else source, bits=4)
    state = layer.state_dict()
    expected = {"weight_packed", "weight_absmax", "bias"}
    assert set(state) == (expected | {"weight_scale"} if scaled else expected)
    for start in (KbitLinear(64, 8, bits=4), KbitLinear.from_linear(tiny_weights(nn.Linear(64, 8)), bits=4)):
        start.load_state_dict(state)
        x = torch.randn(3, 64)
        assert torch.equal(start(x), layer(x))
        assert start.state_dict().keys() == state.keys()


def test_factors_of_another_shape_are_refused():
    layer = KbitLinear.from_linear(tiny_weights(nn.Linear(64, 8)), bits=4)
    state = layer.state_dict() | {"weight_scale": torch.ones(3)}
    for target in (layer, KbitLinear(64, 8)):
        with pytest.raises(RuntimeError, match="weight_scale"):
            target.load_state_dict(state)


def test_state_dict_of_another_width_is_refused():
    state = KbitLinear(64, 8, bits=3).state_dict()
    with pytest.raises(RuntimeError, match="weight_packed"):
        KbitLinear(64, 8, bits=4).load_state_dict(state)


@pytest.mark.parametrize("absmax_format", ABSMAX_FORMATS)
@pytest.mark.parametrize(
    "cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to("cpu", torch.float16)]
)
def test_casting_a_model_leaves_the_parts_alone(cast, absmax_format):
    layer = KbitLinear.from_linear(tiny_weights(nn.Linear(64, 8)), absmax_format=absmax_format)
    before = {name: getattr(layer, name).clone() for name in PARTS}
    cast(layer)
    for name, value in before.items():
        assert getattr(layer, name).dtype == value.dtype
        assert torch.equal(getattr(layer, name), value)
    assert layer.bias.dtype != torch.float32


def test_linear_moves_to_meta_and_back():
    layer = KbitLinear.from_linear(nn.Linear(64, 8)).to("meta")
    assert {getattr(layer, name).device.type for name in PARTS} == {"meta"}
    assert layer.to_empty(device="cpu").weight_packed.dtype == torch.int32


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_layers_survive_deepcopy_and_pickle(clone):
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 50))
    model[1].weight = model[0].weight
    quantize_model(model, kbit.QuantizationPolicy())
    twin = clone(model)
    ids = torch.arange(50)
    assert torch.equal(model(ids), twin(ids))
    assert twin[0].weight_packed is twin[1].weight_packed
    assert twin[0].weight_packed is not model[0].weight_packed


def test_errors_name_the_layer():
    layer = KbitLinear.from_linear(nn.Linear(64, 8), name="layers.3.mlp.down_proj")
    with pytest.raises(ValueError, match=r"65 features.*expects 64 \(layers\.3\.mlp\.down_proj\)"):
        layer(torch.zeros(1, 65))
    with pytest.raises(TypeError, match=r"layers\.3\.mlp\.down_proj"):
        layer(torch.zeros(1, 64, dtype=torch.int64))
    bad = nn.Linear(4, 4)
    bad.weight.data[0, 0] = torch.nan
    with pytest.raises(kbit.NonFiniteWeightError, match=r"layers\.1\.weight holds 1 NaN"):
        KbitLinear.from_linear(bad, name="layers.1")


@pytest.mark.parametrize("bits", [1, 6, 4.0, True])
def test_bits_outside_the_format_are_refused(bits):
    with pytest.raises(ValueError, match="bits must be one of"):
        KbitLinear(8, 8, bits=bits)


def test_gradients_reach_inputs_bias_and_adapters():
    layer = KbitLinear.from_linear(nn.Linear(40, 12), bits=4)
    x = torch.randn(5, 40, requires_grad=True)
    grad = torch.randn(5, 12)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantize())
    torch.testing.assert_close(layer.bias.grad, grad.sum(0))
    down, up = nn.Linear(40, 2, bias=False), nn.Linear(2, 12, bias=False)
    (layer(x) + up(down(x))).sum().backward()
    assert down.weight.grad.abs().sum() > 0
    assert layer.weight_packed.grad is None


def test_an_adapter_below_a_frozen_layer_learns():
    base = KbitLinear.from_linear(nn.Linear(16, 16, bias=False), bits=4)
    adapter = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.5)
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    losses = []
    for _ in range(20):
        loss = F.mse_loss(base(x + adapter(x)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_linear_compiles_whole_with_any_number_of_rows():
    layer = KbitLinear.from_linear(nn.Linear(40, 12), bits=4)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (1, 3, 7):
        x = torch.randn(rows, 40)
        assert torch.equal(compiled(x), layer(x))


# -- KbitEmbedding -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding_returns_decoded_rows(dtype):
    table = nn.Embedding(30, 40, padding_idx=2).to(dtype)
    layer = KbitEmbedding.from_embedding(table, bits=5)
    ids = torch.tensor([[0, 29], [2, 2]])
    assert torch.equal(layer(ids), layer.dequantize(dtype)[ids])
    assert layer.padding_idx == 2
    assert torch.equal(layer.dequantize()[2], torch.zeros(40))
    assert isinstance(layer, nn.Embedding)
    assert "bits=5" in repr(layer)


def test_embedding_answers_in_the_dtype_it_is_cast_to():
    layer = KbitEmbedding.from_embedding(nn.Embedding(30, 40))
    absmax = layer.weight_absmax.clone()
    assert layer.half()(torch.tensor([1])).dtype == torch.float16
    assert layer.to(torch.bfloat16)(torch.tensor([1])).dtype == torch.bfloat16
    assert torch.equal(layer.weight_absmax, absmax)
    assert set(layer.state_dict()) == {"weight_packed", "weight_absmax"}


def test_embedding_refuses_ids_out_of_range_and_renormalization():
    layer = KbitEmbedding.from_embedding(nn.Embedding(30, 40), name="wte")
    with pytest.raises(IndexError, match=r"id 30 at position 1 is outside 0\.\.29 \(wte\)\. Are the ids"):
        layer(torch.tensor([3, 30]))
    with pytest.raises(ValueError, match="max_norm"):
        KbitEmbedding.from_embedding(nn.Embedding(30, 40, max_norm=1.0))


def test_embedding_names_itself_in_errors():
    layer = KbitEmbedding.from_embedding(nn.Embedding(30, 40), name="model.embed_tokens")
    with pytest.raises(TypeError, match=r"got torch.float32 \(model\.embed_tokens\)"):
        layer(torch.ones(3))
    with pytest.raises(ValueError, match=r"ids are on meta, the weight on cpu \(model\.embed_tokens\)"):
        layer(torch.ones(3, dtype=torch.int64, device="meta"))


def test_weights_of_another_shape_or_width_are_not_shared():
    layer = KbitLinear.from_linear(nn.Linear(64, 8), bits=4, name="head")
    for other in (KbitLinear(64, 8, bits=3), KbitLinear(60, 8), KbitLinear(64, 9)):
        with pytest.raises(ValueError, match=r"head \(8, 64\) at 4"):
            other.share(layer)


def test_tied_head_shares_the_table():
    table = nn.Embedding(30, 40)
    table.weight.data.mul_(2.0**-12)
    layer = KbitEmbedding.from_embedding(table, bits=4)
    head = layer.tied_head(nn.Linear(40, 30), name="lm_head")
    for name in ("weight_packed", "weight_absmax", "weight_scale"):
        assert getattr(head, name) is getattr(layer, name)
    x = torch.randn(3, 40)
    assert torch.equal(head(x), kbit.linear(x, layer.quantized(), head.bias))
    model = nn.ModuleList([layer, head])
    assert len(list(model.parameters())) == 3 + 1 + 1  # parts once, the bias, the embedding's dtype
    fresh = KbitEmbedding(30, 40, bits=4)
    twin = nn.ModuleList([fresh, fresh.tied_head(nn.Linear(40, 30))])
    twin.load_state_dict(model.state_dict())
    assert torch.equal(twin[1](x), head(x))


# -- KbitExperts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """What transformers' experts look like."""

    def __init__(self, experts=6, hidden=48, intermediate=24):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate) * 0.1)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for token, (ids, weights) in enumerate(zip(top_k_index, top_k_weights, strict=True)):
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                if expert == self.num_experts:
                    continue
                gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2)
                out[token] += weight * F.linear(self.act_fn(gate) * up, self.down_proj[expert])
        return out


def routed(tokens=9, experts=6, chosen=3, hidden=48, extra=0):
    index = torch.stack([torch.randperm(experts + extra)[:chosen] for _ in range(tokens)])
    return torch.randn(tokens, hidden), index, torch.rand(tokens, chosen)


def decoded(layer, experts):
    """The plain module with the quantized module's weights."""
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj"):
            getattr(experts, name).copy_(layer.dequantize(name))
    return experts


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("extra", [0, 1], ids=["all mine", "some not mine"])
def test_experts_equal_a_loop_over_decoded_weights(bits, extra):
    experts = Experts()
    layer = KbitExperts.from_experts(experts, bits, kbit.QuantizationPolicy(bits=bits))
    inputs = routed(extra=extra)
    torch.testing.assert_close(layer(*inputs), decoded(layer, experts)(*inputs), rtol=1e-5, atol=1e-5)


def test_experts_quantize_every_matrix_on_its_own():
    experts = Experts()
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy())
    gate = kbit.dequantize(kbit.quantize(experts.gate_up_proj.detach()[2, :24]))
    assert torch.equal(layer.dequantize("gate_up_proj")[2, :24], gate)


@pytest.mark.parametrize("extra", [0, 1])
def test_gate_and_up_may_have_factors_of_their_own(extra):
    experts = Experts()
    with torch.no_grad():
        experts.gate_up_proj[1, :24] *= 2000  # beyond 31, so gate needs a factor and up does not
        experts.gate_up_proj[3, 24:] *= 2.0**-14
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy())
    assert layer.gate_up_proj_scale.shape == (6, 2)
    for half in (slice(0, 24), slice(24, 48)):
        alone = kbit.dequantize(kbit.quantize(experts.gate_up_proj.detach()[:, half].contiguous()))
        assert torch.equal(layer.dequantize("gate_up_proj")[:, half], alone)
    fresh = KbitExperts.empty_like(experts, 4, "e4m4", device="cpu")
    fresh.load_state_dict(layer.state_dict())
    fresh.reset_constants(layer.codebook)
    inputs = routed(extra=extra)
    expected = decoded(layer, experts)(*inputs)
    torch.testing.assert_close(layer(*inputs), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(fresh(*inputs), layer(*inputs))


def test_experts_are_deterministic_and_take_no_tokens():
    layer = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy())
    inputs = routed(tokens=64)
    assert torch.equal(layer(*inputs), layer(*inputs))
    empty = layer(torch.zeros(0, 48), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    assert empty.shape == (0, 48)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_experts_answer_in_the_dtype_of_their_input(dtype):
    experts = Experts().to(dtype)
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy())
    x, index, weights = routed()
    result = layer(x.to(dtype), index, weights)
    assert result.dtype == dtype
    expected = decoded(layer, experts.float())(x.to(dtype).float(), index, weights)
    torch.testing.assert_close(result.float(), expected, rtol=0.03, atol=0.03)


def test_experts_pass_gradients_to_their_input_and_weights_of_the_router():
    experts = Experts()
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy())
    grads = []
    for module in (layer, decoded(layer, experts)):
        torch.manual_seed(1)
        x, index, weights = routed()
        x.requires_grad_()
        weights.requires_grad_()
        module(x, index, weights).square().sum().backward()
        grads.append((x.grad, weights.grad))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_experts_compile_whole():
    # fullgraph with dynamic shapes also proves that nothing depends on data: no synchronization.
    layer = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy())
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (5, 9):
        inputs = routed(tokens=tokens)
        torch.testing.assert_close(compiled(*inputs), layer(*inputs), rtol=1e-5, atol=1e-5)


def test_experts_name_themselves_in_errors():
    layer = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy(), name="layers.0.mlp.experts")
    x, index, weights = routed()
    with pytest.raises(ValueError, match=r"47 features.*expects 48 \(layers\.0\.mlp\.experts\)"):
        layer(x[:, 1:], index, weights)


def test_experts_refuse_choices_of_other_tokens():
    layer = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy(), name="layers.0.mlp.experts")
    x, index, weights = routed()
    for arguments in ((x[1:], index, weights), (x, index, weights[:, 1:]), (x[None], index, weights)):
        with pytest.raises(ValueError, match=r"experts: hidden_states must be .*\(layers\.0\.mlp\.experts\)"):
            layer(*arguments)


@pytest.mark.parametrize("scaled", [False, True], ids=["one factor", "factors of their own"])
def test_a_rank_without_tokens_trains(scaled):
    experts = Experts()
    if scaled:
        experts.gate_up_proj.data[1, :24] *= 2000
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy())
    for _ in ("canonical", "tiled"):
        x, weights = torch.zeros(0, 48, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
        layer(x, torch.zeros(0, 3, dtype=torch.int64), weights).sum().backward()
        assert x.grad.shape == (0, 48)
        layer.prepare(force=True)


def test_new_layers_have_their_codebook():
    levels = torch.linspace(-1, 1, 16).tolist()
    experts, inputs = Experts(), routed()
    layer = KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy(codebook=levels))
    fresh = KbitExperts(6, 48, 24, nn.SiLU(), codebook=levels)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(*inputs), layer(*inputs))
    for made in (KbitLinear(8, 8), KbitEmbedding(8, 8), KbitExperts(6, 48, 24, nn.SiLU())):
        assert torch.equal(made.codebook, kbit.normal_float(4))
    with pytest.raises(ValueError, match="ascending"):
        KbitLinear(8, 8, codebook=levels[::-1], device="meta")


LEVELS = torch.linspace(-1, 1, 16).tolist()
MAKERS = [
    lambda device: KbitLinear(40, 9, codebook=LEVELS, device=device),
    lambda device: KbitEmbedding(9, 40, codebook=LEVELS, device=device, dtype=torch.bfloat16),
    lambda device: KbitExperts(6, 48, 24, nn.SiLU(), codebook=LEVELS, device=device),
]


def constants(layer):
    return {key: tensor for key, tensor in layer.named_buffers() if key not in layer.state_dict()}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("way", ["reset", "load", "assign"])
def test_constants_come_back_after_the_meta_device(make, way):
    whole, layer = make("cpu"), make("meta")
    if way != "assign":
        layer.to_empty(device="cpu")
        for tensor in constants(layer).values():
            tensor.fill_(torch.nan)
    places = {key: tensor.data_ptr() for key, tensor in constants(layer).items()}
    if way == "reset":
        layer.reset_parameters()
    else:
        layer.load_state_dict(whole.state_dict(), assign=way == "assign")
    assert constants(layer).keys() == constants(whole).keys() >= {"codebook"}
    for key, tensor in constants(whole).items():
        assert torch.equal(constants(layer)[key], tensor), key
        assert way == "assign" or constants(layer)[key].data_ptr() == places[key]
    assert {tensor.device.type for tensor in (*layer.parameters(), *layer.buffers())} == {"cpu"}


@pytest.mark.parametrize("tied", [False, True])
def test_quantized_models_remember_their_codebook(tied):
    model = Toy(tied)
    quantize_model(model, kbit.QuantizationPolicy(codebook=LEVELS, embedding_bits=4))
    ids = torch.arange(7)
    expected, state = model(ids), model.state_dict()
    model.to("meta").to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.codebook.fill_(torch.nan)
    model.load_state_dict(state)
    assert torch.equal(model(ids), expected)


def test_experts_of_another_layout_are_refused():
    experts = Experts()
    experts.has_bias = True
    with pytest.raises(ValueError, match="has_bias=True"):
        KbitExperts.from_experts(experts, 4, kbit.QuantizationPolicy(), name="layers.0.mlp.experts")


# -- quantize_model ------------------------------------------------------------------------------------------


class Toy(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed_tokens = nn.Embedding(60, 40)
        self.block = nn.ModuleDict({"up_proj": nn.Linear(40, 72), "down_proj": nn.Linear(72, 40)})
        self.experts = Experts(4, 40, 16)
        self.gate = nn.Linear(40, 4)
        self.lm_head = nn.Linear(40, 60, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids):
        x = self.embed_tokens(ids)
        x = x + self.block["down_proj"](F.gelu(self.block["up_proj"](x)))
        weights, index = self.gate(x).softmax(-1).topk(2)
        return self.lm_head(x + self.experts(x, index, weights))


def widths(model):
    return {n: m.bits for n, m in model.named_modules() if isinstance(m, QuantizedModule)}


def test_quantize_model_follows_the_policy():
    model = Toy()
    seen = []
    policy = kbit.QuantizationPolicy(
        bits=4, overrides={"down_proj": 5, "experts": 3}, modules_to_not_convert=["block.up_proj"]
    )
    assert quantize_model(model, policy, lambda *args: seen.append(args)) is model
    assert widths(model) == {"block.down_proj": 5, "experts": 3}
    assert seen == [(1, 2, "block.down_proj"), (2, 2, "experts")]
    assert model.lm_head.weight is model.embed_tokens.weight
    quantize_model(model, kbit.QuantizationPolicy(bits=2))  # what is quantized already stays
    assert widths(model) == {"block.down_proj": 5, "experts": 3, "block.up_proj": 2}


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_tied_heads(tied):
    model = Toy(tied)
    quantize_model(model, kbit.QuantizationPolicy(bits=4, embedding_bits=5))
    assert widths(model)["embed_tokens"] == widths(model)["lm_head"] == 5
    assert (model.lm_head.weight_packed is model.embed_tokens.weight_packed) == tied
    ids = torch.arange(7)
    plain = copy.deepcopy(model)
    assert torch.equal(plain(ids), model(ids))
    assert model(ids).isfinite().all()


def test_a_head_tied_to_something_else_stays_tied_and_plain():
    class Scaled(nn.Embedding):
        pass

    model = Toy()
    model.embed_tokens = Scaled(60, 40)
    model.lm_head.weight = model.embed_tokens.weight
    quantize_model(model, kbit.QuantizationPolicy(embedding_bits=4))
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.embed_tokens.weight


def test_a_module_of_several_names_is_replaced_under_each():
    model = Toy()
    model.again, model.blocks = model.block["up_proj"], nn.ModuleList([model.block, model.block])
    model.more = model.experts
    quantize_model(model, kbit.QuantizationPolicy(embedding_bits=4))
    assert isinstance(model.again, KbitLinear)
    assert model.again is model.block["up_proj"] is model.blocks[1]["up_proj"]
    assert isinstance(model.more, KbitExperts)
    assert model.more is model.experts
    assert not any(type(module) is nn.Linear for name, module in model.named_modules() if name != "gate")


def test_large_parameters_left_behind_are_reported():
    model = nn.ModuleDict({"mixer": nn.Bilinear(100, 100, 101), "proj": nn.Linear(8, 8)})
    with pytest.warns(UserWarning, match=r"mixer\.weight: Bilinear is not nn\.Linear"):
        quantize_model(model, kbit.QuantizationPolicy())


def test_quantize_model_names_what_is_wrong():
    model = Toy()
    model.block["up_proj"].weight.data[3] = torch.inf
    with pytest.raises(kbit.NonFiniteWeightError, match=r"block\.up_proj\.weight holds 40"):
        quantize_model(model, kbit.QuantizationPolicy())
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32).double())
    with pytest.raises(TypeError, match=r"w must be float32, .* got torch.float64 \(1.weight\). Cast it"):
        quantize_model(model, kbit.QuantizationPolicy())
    assert [*map(type, model)] == [nn.Linear, nn.Linear]
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got str"):
        quantize_model("folder", kbit.QuantizationPolicy())
    for wrong, message in ((nn.Linear(8, 8), "from_linear"), (Toy().to("meta"), "meta device")):
        with pytest.raises(ValueError, match=message):
            quantize_model(wrong, kbit.QuantizationPolicy())


def test_a_quantized_model_compiles_whole():
    model = Toy().eval()
    quantize_model(model, kbit.QuantizationPolicy(bits=4, embedding_bits=4))
    ids = torch.arange(6)
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids), model(ids), rtol=1e-4, atol=1e-4)


def test_layers_follow_autocast():
    x, ids, weights = routed()
    linear = KbitLinear.from_linear(nn.Linear(x.shape[1], 40), bits=4)
    experts = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy())
    with torch.autocast("cpu", torch.bfloat16):
        results = linear(x), experts(x, ids, weights)
    low = x.bfloat16()
    for result, expected in zip(results, (linear(low), experts(low, ids, weights)), strict=True):
        assert result.dtype == torch.bfloat16
        assert torch.equal(result, expected)


def test_layers_run_on_the_meta_device():
    x, ids, weights = (tensor.to("meta") for tensor in routed())
    linear = KbitLinear(48, 40, device="meta")
    experts = KbitExperts(6, 48, 24, nn.SiLU(), device="meta")
    for result, columns in ((linear(x), 40), (experts(x, ids, weights), 48)):
        assert result.device.type == "meta"
        assert result.shape == (9, columns)


def test_layers_refuse_forward_mode():
    x, ids, weights = routed()
    linear = KbitLinear.from_linear(nn.Linear(48, 40), name="up")
    experts = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy(), name="experts")
    one = torch.ones_like
    for call, inputs, name in [
        (linear, (x,), "up"),
        (lambda x: experts(x, ids, weights), (x,), "experts"),
        (lambda weights: experts(x, ids, weights), (weights,), "experts"),
    ]:
        with pytest.raises(NotImplementedError, match=rf"no forward-mode derivative.*\({name}\)"):
            torch.func.jvp(call, inputs, tuple(map(one, inputs)))


def test_layers_refuse_the_gradients_of_torch_func_and_take_its_vmap():
    x, ids, weights = routed()
    linear = KbitLinear.from_linear(nn.Linear(48, 40), name="up")
    experts = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy(), name="experts")
    for call, name in ((linear, "up"), (lambda x: experts(x, ids, weights), "experts")):
        with pytest.raises(
            NotImplementedError, match=rf"torch\.func\.grad.*\({name}\)\. Use torch\.autograd"
        ):
            torch.func.grad(lambda x, call=call: call(x).sum())(x)
    grads = [
        torch.autograd.grad(call(x.requires_grad_()).sum(), x)[0] for call in (linear, torch.vmap(linear))
    ]
    torch.testing.assert_close(*grads)


def test_a_width_alone_is_no_policy():
    with pytest.raises(TypeError, match=r"got int. For 4 bits: kbit.KbitConfig\(bits=4\)"):
        kbit.quantize_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), 4)
