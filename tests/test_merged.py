"""Layers of one input that run as one: q, k and v; gate and up. No GPU is needed but for the last tests."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, ModelHook, add_hook_to_module
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import kbit
from kbit.format.adjacent import adjoin, as_one
from kbit.nn import KbitLinear, merged, quantize_model
from kbit.ops import direct, forms
from tiny_models import build

ops = torch.ops.kbit
gpu = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("own_compilations")


@pytest.fixture
def calls(monkeypatch):
    """Names of the layers that multiplied alone."""
    names, own = [], KbitLinear.product

    def product(self, *arguments):
        names.append(self.layer_name.rpartition(".")[2])
        return own(self, *arguments)

    monkeypatch.setattr(KbitLinear, "product", product)
    return names


# -- the op --------------------------------------------------------------------------------------------------


def weights(sizes, columns=96, bits=4):
    return [kbit.quantize(torch.randn(rows, columns), bits).tile() for rows in sizes]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sampled_from([2, 3, 4, 5]),
    st.sampled_from([(96,), (3, 96), (0, 96), (2, 1, 96)]),
    st.booleans(),
    st.sampled_from([None, False, True]),
)
def test_it_is_the_products_side_by_side(sizes, bits, shape, together, biased):
    """`biased`: None, or whether biases are neighbours."""
    q = weights(sizes, bits=bits)
    tiles = [one.tiled for one in q]
    tiles = adjoin(tiles) if together else tiles
    bias = [] if biased is None else [torch.randn(rows) for rows in sizes]
    bias = adjoin(bias) if biased else bias
    x = torch.randn(shape)
    y = ops.merged_linear_tiled(x, tiles, q[0].codebook, q[0].scale, bias, sizes, 96)
    apart = [kbit.linear(x, one, added) for one, added in zip(q, bias or [None] * len(q), strict=True)]
    torch.testing.assert_close(y, torch.cat(apart, dim=-1))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [16, 17, 48])
def test_gate_and_up(rows, together):
    q = weights([rows, rows])
    tiles = [one.tiled for one in q]
    tiles = adjoin(tiles) if together else tiles
    x = torch.randn(3, 96)
    for bias in ([], adjoin([torch.randn(rows), torch.randn(rows)])):
        y = ops.merged_linear_tiled(x, tiles, q[0].codebook, q[0].scale, bias, [rows, rows], 96, True)
        gate, up = (kbit.linear(x, *each) for each in zip(q, bias or [None, None], strict=True))
        torch.testing.assert_close(y, F.silu(gate) * up)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiles": []}, "one weight or more"),
        ({"sizes": [32]}, r"got 2, the sizes \[32\] and 0 biases"),
        ({"bias": [torch.zeros(32)]}, "and 1 biases"),
        ({"bias": [torch.zeros(32), torch.zeros(31)]}, r"bias must have shape \(32,\)"),
        ({"sizes": [32, 31]}, r"silu_and_mul takes gate and up of one size, got \[32, 31\]"),
        ({"sizes": [48, 48]}, r"\[48, 96\] at 4 bits is int32"),
        ({"x": torch.randn(3, 95)}, "x has 95 features, the weight expects 96"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    q = weights([32, 32])
    given = {
        "x": torch.randn(3, 96),
        "tiles": [one.tiled for one in q],
        "bias": [],
        "sizes": [32, 32],
    } | change
    constants = (q[0].codebook, q[0].scale)
    with pytest.raises(ValueError, match=message):
        ops.merged_linear_tiled(
            given["x"], given["tiles"], *constants, given["bias"], given["sizes"], 96, True
        )


def test_neighbours_are_one_tensor_and_others_are_none():
    a, b, c = (one.tiled for one in weights([32, 16, 40]))
    together = adjoin([a, b, c])
    whole = as_one(together)
    assert torch.equal(whole, torch.cat([a, b, c]))
    assert whole.data_ptr() == together[0].data_ptr()
    assert torch.equal(as_one([a]), a)
    for others in ([a, b], together[::2], together[::-1], [*together, a], [together[0], b]):
        assert as_one(others) is None
    assert as_one([together[0], together[1][:, :1]]) is None


# -- modules -------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """As transformers' attention calls its projections; sizes of q, k and v."""

    def __init__(self, *sizes, bias=False):
        super().__init__()
        names = ("q_proj", "k_proj", "v_proj")
        for name, rows in zip(names, sizes, strict=True):
            self.add_module(name, nn.Linear(64, rows, bias=bias))

    def forward(self, hidden_states, mask=None):
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        return torch.cat([q, k, v], dim=-1)


class MLP(nn.Module):
    def __init__(self, act_fn=None, rows=32, bias=False):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(64, rows, bias=bias) for _ in range(2))
        self.down_proj = nn.Linear(rows, 64, bias=False)
        self.act_fn = act_fn or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def quantized(module, **settings):
    root = nn.ModuleDict({"block": module.half()})
    quantize_model(root, kbit.KbitConfig(**({"bits": 4} | settings)))
    return root["block"].eval()


def apart(module, x):
    """What the module's own class computes."""
    with torch.no_grad():
        return module.own.forward(module, x)


X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()


def test_projections_run_as_one(tiles_pay, calls):
    block = quantized(Attention(32, 16, 40))
    assert type(block).__name__ == "MergedAttention"
    with torch.no_grad():
        y = block(X)
        assert calls == []
        block(hidden_states=X)
        assert calls == []
    assert torch.equal(y, apart(block, X))
    assert calls == ["q_proj", "k_proj", "v_proj"]
    assert all(getattr(block, name).merged_call is None for name in ("q_proj", "k_proj", "v_proj"))


def test_an_mlp_runs_as_two(tiles_pay, calls):
    block = quantized(MLP())
    with torch.no_grad():
        y = block(X)
    assert calls == ["down_proj"]
    assert torch.equal(y, apart(block, X))


@pytest.mark.parametrize("module", [Attention(32, 16, 40, bias=True), MLP(bias=True)], ids=["qkv", "mlp"])
def test_biases_are_merged_too(module, tiles_pay, calls):
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    block = quantized(module)
    with torch.no_grad():
        y = block(X)
        assert calls == (["down_proj"] if isinstance(block, merged.MergedMLP) else [])
        assert torch.equal(y, apart(block, X))
        block.load_state_dict(block.state_dict())
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(X), y)
    calls.clear()
    block(X).sum().backward()  # biases may be trained
    assert len(calls) == 3
    assert all(parameter.grad is not None for name, parameter in block.named_parameters() if "bias" in name)


def test_some_biases_stay_apart(tiles_pay, calls):
    module = Attention(32, 16, 40, bias=True)
    module.k_proj.bias = None
    block = quantized(module)
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))
    assert calls == ["k_proj", "q_proj", "k_proj", "v_proj"]
    block.v_proj.bias = nn.Parameter(block.v_proj.bias.float())
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))


def test_inputs_by_name_go_through_the_class(tiles_pay, calls):
    block = quantized(MLP())
    with torch.no_grad():
        assert torch.equal(block(x=X), apart(block, X))
    assert calls == ["gate_proj", "up_proj", "down_proj"] * 2


def test_other_default_devices_do_not_matter(tiles_pay):
    for module in (MLP(), Attention(32, 16, 40)):
        with torch.device("meta"):
            block = quantized(module)
        with torch.no_grad():
            assert torch.equal(block(X), apart(block, X))
        assert isinstance(block, merged.Merged)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_what_is_merged_by_width(bits, tiles_pay, calls):
    block = quantized(Attention(32, 16, 40), bits=bits)
    with torch.no_grad():
        assert torch.equal(block(X), torch.cat([block.q_proj(X), block.k_proj(X), block.v_proj(X)], -1))


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Attention(33, 16, 40), {}),
        (Attention(32, 16, 40), {"overrides": {"v_proj": 5}}),
        (Attention(32, 16, 40), {"absmax_format": "float16"}),
        (MLP(rows=24), {}),
        (MLP(nn.GELU()), {}),
    ],
    ids=["rows", "width", "scales", "gate", "activation"],
)
def test_what_stays_apart(module, settings, tiles_pay, calls):
    block = quantized(module, **settings)
    with torch.no_grad():
        y = block(X)
    assert calls in (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"])
    if isinstance(block, merged.Merged):
        assert torch.equal(y, apart(block, X))


def test_factors_other_than_one_stay_apart(tiles_pay, calls):
    module = Attention(32, 16, 40)
    nn.init.normal_(module.k_proj.weight, std=2.0**-15)
    block = quantized(module)
    assert float(block.k_proj.weight_scale) != 1
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))
    assert calls == ["q_proj", "k_proj", "v_proj"] * 2


def test_a_layer_of_the_model_is_what_it_was(tiles_pay):
    block = quantized(Attention(32, 16, 40))
    alone = KbitLinear.from_linear(nn.Linear(64, 16, bias=False))
    assert set(block.k_proj.state_dict()) == set(alone.state_dict())
    state = block.state_dict()
    assert {name.partition(".")[0] for name in state} == {"q_proj", "k_proj", "v_proj"}
    with torch.no_grad():
        assert torch.equal(block.k_proj(X), block(X)[:, 32:48])


def test_gradients_and_autocast_go_through_the_layers(tiles_pay, calls):
    block = quantized(Attention(32, 16, 40))
    x = X.clone().requires_grad_()
    block(x).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        block(X.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert block(X).dtype == torch.bfloat16
    assert calls == ["q_proj", "k_proj", "v_proj"] * 3


def test_errors_name_the_layer(tiles_pay):
    block = quantized(Attention(32, 16, 40))
    with torch.no_grad(), pytest.raises(ValueError, match=r"x has 63 features.*block\.q_proj"):
        block(X[:, :63])
    assert block.q_proj.merged_call is None


def test_another_input_is_not_mistaken(tiles_pay):
    class Crossed(Attention):
        def forward(self, hidden_states):
            q, k = self.q_proj(hidden_states), self.k_proj(hidden_states + 1)
            return torch.cat([q, k, self.v_proj(hidden_states)], dim=-1)

    block = quantized(Crossed(32, 16, 40))
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))


def test_an_input_that_was_written_to_is_another(tiles_pay):
    class Writing(Attention):
        def forward(self, hidden_states):
            q = self.q_proj(hidden_states)
            return torch.cat([q, self.k_proj(hidden_states.add_(1)), self.v_proj(hidden_states)], dim=-1)

    block = quantized(Writing(32, 16, 40))
    with torch.no_grad():
        assert torch.equal(block(X.clone()), apart(block, X.clone()))


def test_attention_to_other_states_stays_apart(tiles_pay):
    class Cross(Attention):
        def forward(self, hidden_states, encoder_hidden_states=None):
            return super().forward(hidden_states)

    assert type(quantized(Cross(32, 16, 40))) is Cross


def test_mlps_that_compute_something_else_stay(tiles_pay):
    class Residual(MLP):
        def forward(self, x):
            return x + super().forward(x)

    class Dropping(MLP):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

    class Refusing(MLP):
        def forward(self, x):
            raise AssertionError

    class Clamping(MLP):
        def forward(self, x):
            return self.down_proj(
                self.act_fn(self.gate_proj(x)).clamp(max=10) * self.up_proj(x).clamp(-10, 10)
            )

    for kind in (Residual, Dropping, Refusing, Clamping):
        assert type(quantized(kind())) is kind


def test_hooks_run(tiles_pay, calls):
    seen = []
    block, mlp = quantized(Attention(32, 16, 40)), quantized(MLP())
    for layer in (block.k_proj, mlp.up_proj):
        layer.register_forward_hook(lambda module, args, y: seen.append(module.layer_name))
    with torch.no_grad():
        block(X)
        mlp(X)
    assert seen == ["block.k_proj", "block.up_proj"]
    assert calls == ["gate_proj", "up_proj", "down_proj"]
    block.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))


def test_hooks_of_activations_run(tiles_pay):
    mlp = quantized(MLP())
    with torch.no_grad():
        y = mlp(X)
        assert y.any()
        act = mlp.act_fn
        for hook in (
            act.register_forward_hook(lambda module, given, result: torch.zeros_like(result)),
            act.register_forward_pre_hook(lambda module, given: (torch.zeros_like(given[0]),)),
        ):
            assert not mlp(X).any()
            hook.remove()
        mlp.act_fn.forward = torch.zeros_like
        assert not mlp(X).any()
        del mlp.act_fn.forward
        assert torch.equal(mlp(X), y)


def test_hooks_of_all_modules_run(tiles_pay, calls):
    mlp, seen = quantized(MLP()), []
    listen = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    with listen, torch.no_grad():
        mlp(X)
    assert seen == [mlp.gate_proj, mlp.act_fn, mlp.up_proj, mlp.down_proj, mlp]
    assert calls == ["gate_proj", "up_proj", "down_proj"]


def test_hooks_of_accelerates_kind_run(tiles_pay, calls):
    class Doubling(ModelHook):
        def post_forward(self, module, output):
            return 2 * output

    mlp = quantized(MLP())
    with torch.no_grad():
        add_hook_to_module(mlp.up_proj, AlignDevicesHook(execution_device="cpu"))
        y = mlp(X)
        assert calls == ["down_proj"]
        add_hook_to_module(mlp.up_proj, Doubling())
        torch.testing.assert_close(mlp(X), 2 * y)


def test_what_is_replaced_later_is_called(tiles_pay, calls):
    mlp = quantized(MLP())
    with torch.no_grad():
        own = mlp.up_proj.forward
        mlp.up_proj.forward = lambda x: 2 * own(x)
        torch.testing.assert_close(mlp(X), apart(mlp, X))
        del mlp.up_proj.forward
        mlp.act_fn = nn.GELU()
        assert torch.equal(mlp(X), apart(mlp, X))


def test_replaced_and_restored_layers(tiles_pay, calls):
    block = quantized(Attention(32, 16, 40))
    block.k_proj = nn.Linear(64, 16).half()
    with torch.no_grad():
        assert torch.equal(block(X), apart(block, X))
        block.q_proj.restore()
        block.q_proj.stays_canonical = True
        assert torch.equal(block(X), apart(block, X))
    other = quantized(Attention(32, 16, 40))
    codebook = torch.linspace(-1, 1, 16)
    other.k_proj.fill("weight", SimpleNamespace(**vars_of(kbit.quantize(torch.randn(16, 64), 4, codebook))))
    with torch.no_grad():
        assert torch.equal(other(X), apart(other, X))


def vars_of(q):
    return {"packed": q.packed, "absmax": q.absmax, "scale": q.scale, "codebook": q.codebook}


def test_loading_keeps_neighbours(tiles_pay, calls):
    block, other = quantized(Attention(32, 16, 40)), quantized(Attention(32, 16, 40))
    block.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(block(X), other(X))
    assert calls == []
    assert as_one([block.q_proj.weight, block.k_proj.weight, block.v_proj.weight]) is not None


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_a_factor_that_is_loaded_is_of_its_layer_alone(tiles_pay, name):
    """Layers of one launch have one factor in memory."""
    block, module = quantized(Attention(32, 16, 40)), Attention(32, 16, 40)
    nn.init.normal_(getattr(module, name).weight, std=2.0**-15)
    other = quantized(module)
    for _ in range(2):
        block.load_state_dict(other.state_dict())
        with torch.no_grad():
            assert torch.equal(block(X), other(X))
        other = quantized(Attention(32, 16, 40))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_compute_the_same(clone, tiles_pay):
    for block in (quantized(Attention(32, 16, 40)), quantized(MLP())):
        again = clone(block)
        assert type(again) is type(block)
        with torch.no_grad():
            assert torch.equal(again(X), block(X))
        for siblings in again.siblings():
            assert as_one(siblings.tiles) is not None
            assert merged.are_joined(siblings)


def test_moves_join_again(tiles_pay, calls):
    block = quantized(Attention(32, 16, 40))
    forms.set_rule(lambda op, device: False)
    block.to("meta").to_empty(device="cpu")
    forms.set_rule(lambda op, device: True)
    block.load_state_dict(quantized(Attention(32, 16, 40)).state_dict())
    with torch.no_grad():
        block.to(torch.float32)(X)
    assert calls == []


@pytest.mark.filterwarnings("error:.*lru_cache")
@pytest.mark.parametrize("module", [Attention(32, 16, 40), MLP()], ids=["attention", "mlp"])
def test_compiled_whole(module, tiles_pay):
    block = quantized(module)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    with torch.no_grad():
        y = torch.compile(block, fullgraph=True, backend=backend)(X)
        assert torch.equal(y, block(X))
        assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(X), y)
    assert sum("kbit.merged_linear_tiled" in name for name in targets) == 1
    assert sum("kbit.linear_tiled" in name for name in targets) == isinstance(block, merged.MergedMLP)


def test_dequantizing_gives_their_class_back(tiles_pay):
    root = nn.ModuleDict({"a": Attention(32, 16, 40), "b": MLP()})
    quantize_model(root, kbit.KbitConfig(bits=4))
    kbit.dequantize_model(root)
    assert (type(root["a"]), type(root["b"])) == (Attention, MLP)


MERGED = {
    "llama": {"MergedLlamaAttention", "MergedLlamaMLP"},
    "qwen3_moe": {"MergedQwen3MoeAttention", "MergedQwen3MoeMLP"},
    "qwen3_next": {"MergedQwen3NextGatedDeltaNet", "MergedQwen3NextAttention", "MergedQwen3NextMLP"},
    "glm4_moe_lite": {"MergedGlm4MoeLiteAttention", "MergedGlm4MoeLiteMLP"},
}


@pytest.mark.parametrize("name", MERGED)
def test_models_of_transformers(name, tiles_pay):
    model = quantize_model(build(name, torch.float16), kbit.KbitConfig(bits=4)).eval()
    found = {type(module).__name__ for module in model.modules() if isinstance(module, merged.Merged)}
    assert found == MERGED[name]
    ids = torch.randint(0, 72, (2, 7))
    with torch.no_grad():
        logits = model(ids).logits
        for module in model.modules():
            if isinstance(module, merged.Merged):
                module.__class__ = module.own
        torch.testing.assert_close(model(ids).logits, logits, rtol=2e-3, atol=2e-3)


# -- on a GPU ------------------------------------------------------------------------------------------------


def launches(module, x):
    """Names of the kernels of a call."""
    with torch.no_grad():
        module(x)
        with torch.profiler.profile() as profile:
            module(x)
            torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 40, 300])
def test_one_launch_on_a_gpu(tokens, dtype):
    for module, count in ((Attention(128, 32, 40), 1), (MLP(rows=96), 2)):
        block = quantized(module).to("cuda")
        x = torch.randn(tokens, 64, device="cuda", dtype=dtype)
        kernels = [name for name in launches(block, x) if name in ("stream", "wgmma")]
        assert len(kernels) == count, kernels
        with torch.no_grad():
            y = block(x)
            torch.testing.assert_close(y, apart(block, x), rtol=1e-2, atol=1e-2)
            assert all(torch.equal(block(x), y) for _ in range(20))
            assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x), y)


@gpu
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_one_hot_inputs_give_the_weights(bits):
    block = quantized(Attention(128, 32, 40), bits=bits).to("cuda")
    x = torch.eye(64, device="cuda", dtype=torch.float16)
    layers = (block.q_proj, block.k_proj, block.v_proj)
    decoded = torch.cat([layer.dequantize(torch.float16) for layer in layers])
    with torch.no_grad():
        for rows in (slice(0, 1), slice(1, 9), slice(9, 64), slice(0, 64)):
            assert torch.equal(block(x[rows]), decoded.T[rows])


@gpu
def test_a_cuda_graph_records_merged_layers():
    block = quantized(MLP(rows=96)).to("cuda")
    x = torch.randn(4, 64, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        other = quantized(MLP(rows=96)).to("cuda")
        block.load_state_dict(other.state_dict())
        graph.replay()
        assert torch.equal(y, other(x))


@gpu
def test_layers_past_the_dispatcher(monkeypatch):
    block, seen = quantized(MLP(rows=96)).to("cuda"), []
    way = direct.ways["cuda"]

    def multiply(*arguments):
        seen.append(len(arguments))
        return way.multiply(*arguments)

    monkeypatch.setitem(direct.ways, "cuda", way._replace(multiply=multiply))
    with torch.no_grad():
        block(X.cuda())
    assert seen == [8, 7]
