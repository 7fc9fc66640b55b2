"""Parts of quantized layers: other dtypes or strides than layers make, no rows; how torch calls them."""

import copy

import pytest
import torch
from torch import nn

import kbit
from kbit.format import ABSMAX_FORMATS
from kbit.format.policy import QuantizationPolicy
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nvfp4.layers import NVFP4Linear, NVFP4Settings
from test_nn import Experts, routed


@pytest.mark.parametrize("stored", ABSMAX_FORMATS)
@pytest.mark.parametrize("held", ABSMAX_FORMATS)
def test_block_scales_of_another_format_are_not_converted(held, stored):
    """E4M4's bytes copied into floats, or floats into bytes, are other scales."""
    source = KbitLinear.from_linear(nn.Linear(64, 8), absmax_format=stored)
    layer = KbitLinear(64, 8, absmax_format=held)
    if stored == held:
        layer.load_state_dict(source.state_dict())
    else:
        with pytest.raises(RuntimeError, match=r"dtype mismatch for 0\.weight_absmax: torch\.\w+ in the"):
            nn.Sequential(layer).load_state_dict(nn.Sequential(source).state_dict())
    layer.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(layer.dequantize(), source.dequantize())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("part", "dtype"), [("packed", "float32"), ("packed", "uint8"), ("absmax", "int8")])
def test_parts_of_no_format_are_refused(part, dtype, prepared, assign):
    layer = KbitLinear.from_linear(nn.Linear(64, 8))
    if prepared:
        layer.prepare(force=True)
    x, state = torch.randn(2, 64), layer.state_dict()
    before, names = layer(x), [name for name, _ in layer.named_parameters()]
    state[f"weight_{part}"] = state[f"weight_{part}"].to(getattr(torch, dtype))
    with pytest.raises(RuntimeError, match=rf"dtype mismatch for weight_{part}: torch\.{dtype} in the"):
        layer.load_state_dict(state, assign=assign)
    assert [name for name, _ in layer.named_parameters()] == names
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize(("part", "dtype"), [("packed", torch.uint8), ("scale", torch.bfloat16)])
def test_no_product_reads_beyond_parts_of_smaller_elements(part, dtype):
    """Where no gradient is wanted, a layer's product checks less; parts may have been set by hand."""
    layer = KbitLinear.from_linear(nn.Linear(64, 8))
    wrong = getattr(layer, f"weight_{part}").to(dtype)
    delattr(layer, f"weight_{part}")
    layer.register_buffer(f"weight_{part}", wrong)
    with torch.no_grad(), pytest.raises(TypeError, match=f"{part} must be \\w+32, got {dtype}"):
        layer(torch.ones(2, 64))


def test_nvfp4_scales_are_not_converted():
    """Stored as the floats that they are, a copy would round them to whole numbers."""
    layer = NVFP4Linear(64, 32, NVFP4Settings())
    state = layer.state_dict()
    state["weight_scales"] = state["weight_scales"].view(torch.float8_e4m3fn)
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=r"mismatch for weight_scales: torch\.float8_e4m3fn in the"):
            copy.deepcopy(layer).load_state_dict(state, assign=assign)


def strided(tensor):
    """The same values in memory of another order."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


@pytest.mark.parametrize("apart", [False, True])
def test_assigned_parts_may_have_any_strides(apart):
    experts = Experts()
    if apart:  # so that gate and up have factors of their own
        with torch.no_grad():
            experts.gate_up_proj[1, : experts.gate_up_proj.shape[1] // 2] *= 2000
    layer, inputs = KbitExperts.from_experts(experts, 4, QuantizationPolicy()), routed()
    assert (layer.gate_up_proj_scale.dim() == 2) == apart
    twin = copy.deepcopy(layer)
    twin.load_state_dict({name: strided(part) for name, part in layer.state_dict().items()}, assign=True)
    assert not twin.gate_up_proj_packed.is_contiguous()
    assert torch.equal(twin(*inputs), layer(*inputs))
    assert torch.equal(twin.dequantize("gate_up_proj"), layer.dequantize("gate_up_proj"))
    twin.prepare(force=True)
    assert torch.equal(twin.dequantize("gate_up_proj"), layer.dequantize("gate_up_proj"))


def test_layers_without_rows():
    """A rank's share of a table, for one, may be empty."""
    linear, table = KbitLinear(40, 0, bias=False), KbitEmbedding(0, 40)
    assert linear(torch.ones(3, 40)).shape == (3, 0)
    assert linear.dequantize().shape == table.dequantize().shape == (0, 40)
    linear.prepare(force=True)
    assert linear(torch.ones(3, 40)).shape == (3, 0)
    assert linear.state_dict()["weight_packed"].shape == (0, 8)
    assert linear.dequantize().shape == (0, 40)


@pytest.mark.parametrize("factors", [(2.0**-12, 1.0), (1.0, 2.0**-12), (2.0**-12, 2.0**-20)])
@pytest.mark.parametrize("left_out", ["table", "head"])
def test_tied_layers_load_from_a_file_that_has_their_weight_once(left_out, factors):
    """safetensors.torch.save_model keeps one of the names, the first by the alphabet."""
    layers = []
    for factor in factors:
        table = nn.Embedding(30, 40)
        table.weight.data.mul_(factor)
        layer = KbitEmbedding.from_embedding(table)
        layers.append(nn.ModuleDict({"table": layer, "head": layer.tied_head()}))
    source, twin = layers[0], copy.deepcopy(layers[1])
    state = {name: part for name, part in source.state_dict().items() if not name.startswith(left_out)}
    assert not twin.load_state_dict(state, strict=False).unexpected_keys
    for name in ("table", "head"):
        assert torch.equal(twin[name].dequantize(), source[name].dequantize())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", ["linear", "table"])
def test_torch_export_finds_every_part(kind, inside):
    layer: nn.Module
    if kind == "linear":
        layer, x = KbitLinear.from_linear(nn.Linear(40, 8)), torch.randn(3, 40)
    else:
        layer, x = KbitEmbedding.from_embedding(nn.Embedding(30, 40)).bfloat16(), torch.tensor([[1, 29]])
    program = torch.export.export(nn.Sequential(layer) if inside else layer, (x,))
    assert torch.equal(program.module()(x), layer(x))


@pytest.mark.parametrize("apart", [False, True])
def test_torch_export_of_experts_leaves_the_number_of_tokens_open(apart):
    experts = Experts()
    if apart:
        experts.gate_up_proj.data[:, : experts.gate_up_proj.shape[1] // 2] *= 2.0**-14
    layer = KbitExperts.from_experts(experts, 4, QuantizationPolicy())
    assert (layer.gate_up_proj_scale.dim() == 2) == apart

    def inputs(tokens):
        ids = torch.arange(2 * tokens).view(tokens, 2) % layer.num_experts
        return torch.randn(tokens, layer.hidden_dim), ids, torch.rand(tokens, 2)

    tokens = torch.export.Dim("tokens", max=4096)
    program = torch.export.export(layer, inputs(7), dynamic_shapes=({0: tokens},) * 3)
    for count in (1, 2, 7, 9):
        given = inputs(count)
        assert torch.equal(program.module()(*given), layer(*given))


def test_a_state_that_is_not_quantized_says_what_to_do_once():
    model = nn.Sequential(*(KbitLinear(64, 64) for _ in range(3)))
    with pytest.raises(RuntimeError, match="load it into the unquantized model") as caught:
        model.load_state_dict(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).state_dict())
    assert str(caught.value).count("kbit.quantize_model") == 1


def test_a_factor_that_is_not_1_is_a_parameter_to_everybody():
    linear = nn.Linear(256, 64)
    linear.weight.data *= 1e-5
    layer, plain = KbitLinear.from_linear(linear), KbitLinear.from_linear(nn.Linear(256, 64))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 256)
    for one in (layer, plain):
        assert "weight_scale" not in one._non_persistent_buffers_set
        program = torch.export.export(nn.Sequential(one), (x,))
        assert torch.equal(program.module()(x), layer(x))


# -- state dicts of another codebook -------------------------------------------------------------------------


def test_a_state_of_another_codebook_is_refused(tmp_path):
    linear, levels = nn.Linear(64, 8), [-1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0]
    saved = KbitLinear.from_linear(linear, bits=3, codebook=levels)
    torch.save(saved.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    same = KbitLinear.from_linear(nn.Linear(64, 8), bits=3, codebook=levels)
    same.load_state_dict(state)
    assert torch.equal(same.dequantize(), saved.dequantize())
    for strict, assign in ((True, False), (False, False), (True, True)):
        other = nn.Sequential(KbitLinear.from_linear(nn.Linear(64, 8), bits=3))
        before = other[0].dequantize()
        with pytest.raises(RuntimeError, match="codebook mismatch for 0.weight"):
            other.load_state_dict(nn.Sequential(saved).state_dict(), strict=strict, assign=assign)
        assert torch.equal(other[0].dequantize(), before)


def test_the_refusal_names_experts_weights():
    levels = [-1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0]
    saved = KbitExperts.from_experts(Experts(), 3, QuantizationPolicy(bits=3, codebook=levels))
    other = nn.ModuleDict({"mlp": KbitExperts.from_experts(Experts(), 3, QuantizationPolicy(bits=3))})
    with pytest.raises(RuntimeError, match=r"for mlp\.gate_up_proj, mlp\.down_proj: \[-1\.0"):
        other.load_state_dict(nn.ModuleDict({"mlp": saved}).state_dict())


def test_a_state_without_metadata_loads():
    saved = KbitLinear.from_linear(nn.Linear(64, 8), bits=3)
    other = KbitLinear.from_linear(nn.Linear(64, 8), bits=3)
    other.load_state_dict(dict(saved.state_dict()))
    assert torch.equal(other.dequantize(), saved.dequantize())


def test_layers_are_called_by_the_names_that_torch_has():
    x, ids = torch.randn(3, 64), torch.tensor([1, 2])
    linear, table = nn.Linear(64, 96), nn.Embedding(10, 64)
    settings = NVFP4Settings(activations="16bit")
    layers = [KbitLinear.from_linear(linear), NVFP4Linear.from_linear(linear, settings)]
    layers.append(KbitEmbedding.from_embedding(table))
    for layer, given in zip(layers, (x, x, ids), strict=True):
        assert torch.equal(layer(input=given), layer(given))


def test_experts_that_are_quantized_already_are_refused():
    experts = KbitExperts.from_experts(Experts(), 3, QuantizationPolicy(bits=3))
    for other in (experts, nn.Linear(8, 8)):
        with pytest.raises(ValueError, match=r"mlp: cannot quantize these experts: they have no 3-D weights"):
            KbitExperts.from_experts(other, 4, QuantizationPolicy(), name="mlp")


@pytest.mark.parametrize("what", ["forward", "parameter"])
def test_experts_that_compute_more_are_refused(what):
    experts = Experts()
    if what == "forward":
        own = experts.forward
        experts.forward, reason = lambda *given: 2 * own(*given), "its forward is not that of its class"
    else:
        experts.gain, reason = nn.Parameter(torch.ones(6)), "it holds gain, too"
    with pytest.raises(ValueError, match=f"mlp: cannot quantize these experts: {reason}. Leave them as they"):
        KbitExperts.from_experts(experts, 4, QuantizationPolicy(), name="mlp")


@pytest.mark.parametrize("what", ["nan", "inf", "meta", "double", "progress"])
def test_nothing_is_quantized_where_something_is_refused(what):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    progress, last = None, model[1]
    if what == "progress":
        progress = 5
    elif what == "meta":
        last.to("meta")
    elif what == "double":
        last.double()
    else:
        last.weight.data[3, 4] = float(what)
    with pytest.raises(
        (TypeError, ValueError), match=r"^(quantize.*(1\.weight|progress)|1\.weight is on the meta)"
    ):
        kbit.quantize_model(model, kbit.KbitConfig(), progress)
    assert all(type(layer) is nn.Linear for layer in model)


def test_nothing_is_dequantized_where_progress_is_no_function():
    model = kbit.quantize_model(nn.Sequential(nn.Linear(32, 32)), kbit.KbitConfig())
    with pytest.raises(TypeError, match=r"dequantize_model: progress must be a function .*, got int\. Leave"):
        kbit.dequantize_model(model, progress=5)
    assert type(model[0]) is not nn.Linear


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["kbit", "nvfp4"])
def test_factors_of_a_state_dict_in_float16_are_refused(kind, assign):
    """A hundredth or more of them would be lost, all of a small one, and products want float32."""
    linear = nn.Linear(64, 8)
    linear.weight.data *= 1e-6
    if kind == "kbit":
        name, layer = "weight_scale", KbitLinear.from_linear(linear)
    else:
        name, layer = "weight_global_scale", NVFP4Linear.from_linear(linear, NVFP4Settings("16bit"))
    state = layer.state_dict()
    assert state[name].dtype == torch.float32
    x, halved = torch.randn(2, 64), dict(state, **{name: state[name].half()})
    before = layer(x)
    with pytest.raises(RuntimeError, match=rf"dtype mismatch for {name}: torch\.float16 in the checkpoint"):
        layer.load_state_dict(halved, assign=assign)
    assert torch.equal(layer(x), before)
    layer.load_state_dict(state, assign=assign)
