"""A shared expert that runs as one more of the routed ones. No GPU is needed but for the last tests."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kbit
from kbit.format.adjacent import adjoin, as_one
from kbit.nn import KbitExperts, mixins, quantize_model, router, shared_expert
from kbit.nn.shared_expert import MergedExperts
from kbit.nn.together import run_together
from tiny_models import ARCHITECTURES

ops = torch.ops.kbit
gpu = pytest.mark.gpu
pytestmark = pytest.mark.usefixtures("own_compilations")
HIDDEN, INTER, EXPERTS = 64, 32, 5


@pytest.fixture
def tiles_pay(tiles_pay, monkeypatch):
    """As if the CPU had kernels, those of routers too."""
    monkeypatch.setattr(router.FusedRouter, "takes", lambda self, x: not torch.is_grad_enabled())


# -- the ops -------------------------------------------------------------------------------------------------


def parts(bits=4, intermediate=INTER, experts=EXPERTS, together=True):
    """(tiles of experts, gate and up; of experts and down; codebook; factors)."""

    def tiles(*shape):
        q = kbit.quantize(torch.randn(*shape) / shape[-1] ** 0.5, bits)
        return q.tile().tiled, q.codebook

    stacks = [tiles(experts, 2 * intermediate, HIDDEN)[0], tiles(experts, HIDDEN, intermediate)[0]]
    gate, codebook = tiles(intermediate, HIDDEN)
    gate_up, down = (
        [stacks[0], gate, tiles(intermediate, HIDDEN)[0]],
        [
            stacks[1],
            tiles(HIDDEN, intermediate)[0],
        ],
    )
    if together:
        gate_up, down = adjoin(gate_up), adjoin(down)
    return gate_up, down, codebook, torch.ones(experts + 1)


def choices(tokens, experts=EXPERTS, dtype=torch.float32):
    """Ids and weights of three experts and the shared one."""
    ids = torch.stack([torch.randperm(experts)[:3] for _ in range(tokens)]) if tokens else torch.zeros(0, 3)
    ids = torch.cat([ids.long(), torch.full((tokens, 1), experts)], dim=1)
    return ids, torch.rand(tokens, 4).to(dtype)


def defined(x, gate_up, down, codebook, scale, ids, weights, intermediate):
    """By the definition, in float64; and sums of magnitudes of the down projections, for a bound."""

    def decoded(tiles, *shape):
        of = scale.new_ones(tiles.shape[:-3])
        return ops.dequantize_tiled(tiles, codebook, of, *shape, torch.float32).double()

    hidden = x.shape[1]
    gates_ups = decoded(gate_up[0], 2 * intermediate, hidden)
    shared = torch.cat([decoded(one, intermediate, hidden) for one in gate_up[1:]])
    gates_ups = torch.cat([gates_ups, shared[None]])
    downs = torch.cat([decoded(down[0], hidden, intermediate), decoded(down[1], hidden, intermediate)[None]])
    y, magnitude = torch.zeros(2, *x.shape, dtype=torch.float64)
    for token, slot in [(t, u) for t in range(len(x)) for u in range(ids.shape[1])]:
        expert = int(ids[token, slot])
        if 0 <= expert < len(downs):
            gate, up = (gates_ups[expert] @ x[token].double()).chunk(2)
            rows, weight = F.silu(gate) * up, weights[token, slot].double()
            y[token] += weight * (downs[expert] @ rows)
            magnitude[token] += weight * (downs[expert].abs() @ rows.abs())
    return y, magnitude


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("intermediate", [INTER, 24])
@pytest.mark.parametrize("tokens", [0, 1, 2, 9])
def test_experts_and_one_more(tokens, intermediate, together):
    weights = parts(3, intermediate, together=together)
    x, routed = torch.randn(tokens, HIDDEN), choices(tokens)
    if tokens > 1:
        routed[0][1, 0] = -1  # another device's
    y = ops.experts_with_shared(x, *weights, *routed, intermediate)
    assert y.shape == x.shape
    expected, _ = defined(x, *weights, *routed, intermediate)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(HIDDEN)}, r"hidden_states must be \[T, K\]"),
        ({"x": torch.randn(2, HIDDEN + 1)}, "is int32"),
        ({"gate_up": lambda given: given[:2]}, "gate_up must be the tiles of experts, a gate and an up"),
        ({"down": lambda given: given[::-1]}, "down those of experts and one more"),
        ({"scale": torch.ones(EXPERTS)}, r"scale must be \[6\], for the shared expert too, got \(5,\)"),
        ({"weights": torch.rand(2, 3)}, "top_k_weights"),
        ({"ids": torch.zeros(2, 4)}, "ids must be int32 or int64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    ids, weights = choices(2)
    gate_up, down, codebook, scale = parts()
    given = {"x": torch.randn(2, HIDDEN), "gate_up": gate_up, "down": down, "codebook": codebook}
    given |= {"scale": scale, "ids": ids, "weights": weights}
    for name, value in change.items():
        given[name] = value(given[name]) if callable(value) else value
    with pytest.raises((TypeError, ValueError), match=message):
        ops.experts_with_shared(*given.values(), INTER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_last_row_of_logits(dtype):
    x, weight, last = torch.randn(3, 40).to(dtype), torch.randn(9, 40).to(dtype), torch.randn(1, 40).to(dtype)
    for out in (None, torch.float32):
        logits = ops.moe_logits(x, weight, out, last)
        assert torch.equal(logits[:, :9], ops.moe_logits(x, weight, out))
        assert torch.equal(logits[:, 9:], ops.moe_logits(x, last, out))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_a_choice_that_all_tokens_have(scoring):
    logits, gates = torch.randn(4, 9), torch.randn(4, 1)
    ids, weights = ops.moe_route(logits, 3, scoring, True, None, 2.5)
    for shared, given in (("one", logits), ("sigmoid", torch.cat([logits, gates], dim=1))):
        more_ids, more_weights = ops.moe_route(given, 3, scoring, True, None, 2.5, shared)
        assert torch.equal(more_ids, torch.cat([ids, torch.full((4, 1), 9)], dim=1))
        last = gates.sigmoid() if shared == "sigmoid" else torch.ones(4, 1)
        assert torch.equal(more_weights, torch.cat([weights, last], dim=1))


def test_other_shared_choices_are_refused():
    with pytest.raises(ValueError, match="shared must be one of"):
        ops.moe_route(torch.zeros(1, 4), 2, "softmax", True, None, 1.0, "two")
    with pytest.raises(ValueError, match=r"top_k must be in 1\.\.3"):
        ops.moe_route(torch.zeros(1, 4), 4, "softmax", True, None, 1.0, "sigmoid")
    with pytest.raises(TypeError, match="last must be torch.float32"):
        ops.moe_logits(torch.zeros(1, 8), torch.zeros(2, 8), None, torch.zeros(1, 8).half())
    with pytest.raises(ValueError, match=r"last must be \[1, 8\]"):
        ops.moe_logits(torch.zeros(1, 8), torch.zeros(2, 8), None, torch.zeros(8))


# -- modules -------------------------------------------------------------------------------------------------

MODELS = ["qwen3_next", "glm4_moe_lite"]


def build(name, bits=4, dtype=torch.float16, shared=INTER, **settings):
    """A quantized model whose shared experts are of so many features, of the routed ones' size or not."""
    from transformers import AutoModelForCausalLM

    config = ARCHITECTURES[name]()
    config.moe_intermediate_size = INTER
    config.shared_expert_intermediate_size = shared
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return quantize_model(model, kbit.KbitConfig(bits=bits, **settings))


def blocks(model):
    return [module for module in model.modules() if isinstance(module, MergedExperts)]


def joined(block):
    found = shared_expert._parts(block)
    x = torch.zeros(1, block.experts.hidden_dim, dtype=torch.float16)
    with torch.no_grad():
        return found is not None and block._takes(found, x)


def apart(model, ids):
    """What a model computes without merged experts."""
    kinds = {block: type(block) for block in blocks(model)}
    for block, kind in kinds.items():
        block.__class__ = kind.own
    try:
        with torch.no_grad():
            return model(ids).logits
    finally:
        for block, kind in kinds.items():
            block.__class__ = kind


@pytest.fixture
def calls(monkeypatch):
    """How many tokens went to experts of the model's own blocks."""
    counts, own = [], KbitExperts.forward

    def forward(self, hidden_states, *args):
        counts.append(hidden_states.shape[0])
        return own(self, hidden_states, *args)

    monkeypatch.setattr(KbitExperts, "forward", forward)
    return counts


@pytest.mark.parametrize("name", MODELS)
def test_blocks_of_transformers(name, tiles_pay, calls):
    model = build(name)
    assert blocks(model)
    assert all(map(joined, blocks(model)))
    for shape, backend in (((1, 1), "aot_eager"), ((2, 7), "eager")):
        ids = torch.randint(0, 72, shape)
        with torch.no_grad():
            y = model(ids).logits
        assert calls == []
        torch.testing.assert_close(apart(model, ids), y, rtol=2e-3, atol=2e-3)
        calls.clear()
        with torch.no_grad():
            assert torch.equal(torch.compile(model, fullgraph=True, backend=backend)(ids).logits, y)
        assert calls == []


@pytest.mark.parametrize("name", MODELS)
def test_many_tokens_and_gradients_go_the_model_s_way(name, tiles_pay, calls):
    model = build(name)
    block = blocks(model)[0]
    most = 64 * block.experts.num_experts // block.gate.top_k
    with torch.no_grad():
        model(torch.randint(0, 72, (1, most)))
        assert calls == []
        model(torch.randint(0, 72, (1, most + 1)))
    assert set(calls) == {most + 1}
    model(torch.randint(0, 72, (1, 3)))
    assert set(calls) == {most + 1, 3}


def test_hooks_run(tiles_pay, calls):
    model, seen = build("qwen3_next"), []
    (first, *_) = blocks(model)
    for module in (first.gate, first.shared_expert, first.shared_expert.up_proj, first.shared_expert_gate):
        handle = module.register_forward_hook(lambda module, args, y: seen.append(type(module).__name__))
        with torch.no_grad():
            model(torch.randint(0, 72, (1, 3)))
        handle.remove()
    assert seen == ["KbitQwen3NextTopKRouter", "MergedQwen3NextMLP", "KbitLinear", "FusedLinear"]
    assert calls == [3] * 4


def test_what_is_replaced_later_is_called(tiles_pay, calls):
    model, ids = build("qwen3_next"), torch.randint(0, 72, (1, 3))
    (first, *_) = blocks(model)
    for module in (first.gate, first.experts, first.shared_expert, first.shared_expert.down_proj):
        own, seen = module.forward, []
        module.forward = lambda *given, own=own, seen=seen: seen.append(1) or own(*given)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, apart(model, ids), rtol=0.01, atol=0.01)
        del module.forward
        assert seen


@pytest.mark.parametrize(
    "settings",
    [{"shared": 16}, {"overrides": {"shared_expert": 5}}, {"absmax_format": "float16"}],
    ids=["size", "width", "scales"],
)
def test_what_stays_apart(settings, tiles_pay, calls):
    model, ids = build("qwen3_next", **settings), torch.randint(0, 72, (1, 3))
    assert not any(map(joined, blocks(model)))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, apart(model, ids))


def test_factors_other_than_one_stay_apart(tiles_pay):
    for change in ("experts", "shared_expert"):
        model = build("qwen3_next")
        block = blocks(model)[0]
        if change == "experts":
            block.experts.set_scale("down_proj", torch.full((4,), 0.5))
        else:
            block.shared_expert.down_proj.set_scale("weight", torch.tensor(0.5))
        assert not joined(block)
        x = torch.randn(1, 3, 48).half()
        with torch.no_grad():
            assert torch.equal(block(x), type(block).own.forward(block, x))


def test_state_copies_and_pickles_are_those_of_the_model(tiles_pay, tmp_path):
    model, ids = build("qwen3_next"), torch.randint(0, 72, (1, 3))
    with torch.no_grad():
        y = model(ids).logits
        assert not [name for name in model.state_dict() if "factors" in name]
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert len(blocks(again)) == len(blocks(model))
            assert torch.equal(again(ids).logits, y)
            for block in blocks(again):
                for tiles in shared_expert._tiles(shared_expert._parts(block)):
                    assert as_one(tiles) is not None
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert all(map(joined, blocks(loaded)))
        assert torch.equal(loaded(ids).logits, y)
        other = build("qwen3_next")
        other.load_state_dict(model.state_dict())
        assert all(map(joined, blocks(other)))
        assert torch.equal(other(ids).logits, y)


def test_moves_join_again(tiles_pay):
    model = build("glm4_moe_lite")
    (block,) = blocks(model)
    factors = block.factors
    model.to("cpu")
    assert block.factors is factors
    block.half().float()
    assert block.factors.dtype == torch.float32
    assert joined(block)


def test_nothing_is_drawn_from_the_generator_that_all_share(tiles_pay):
    model = build("qwen3_next")
    for module in model.modules():
        if isinstance(module, mixins.MixedIn):
            module.__class__ = module.own
    state = torch.get_rng_state()
    run_together(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(joined, blocks(model)))
    assert blocks(model)


def test_other_default_devices_do_not_matter(tiles_pay):
    model = build("qwen3_next")
    block = blocks(model)[0]
    block.__class__ = type(block).own
    with torch.device("meta"):
        shared_expert.merge_shared_experts(model)
    assert joined(block)
    x = torch.randn(1, 3, 48).half()
    with torch.no_grad():
        assert torch.equal(block(hidden_states=x), type(block).own.forward(block, x))


def test_dequantizing_gives_their_class_back(tiles_pay):
    model = build("qwen3_next")
    kbit.dequantize_model(model)
    assert not [module for module in model.modules() if isinstance(module, mixins.MixedIn)]
    assert not [name for name, _ in model.named_buffers() if "factors" in name]


def test_a_class_that_computes_something_else_stays(tiles_pay):
    model = build("qwen3_next")
    block = blocks(model)[0]
    own = type(block).own

    class Halved(own):
        def forward(self, hidden_states):
            return super().forward(hidden_states) / 2

    class Noisy(own):
        def forward(self, hidden_states):
            y = super().forward(hidden_states)
            return y + 1 if self.training else y

    class Refusing(own):
        def forward(self, hidden_states, mask):
            raise AssertionError

    class Pair(own):
        def forward(self, hidden_states):
            return super().forward(hidden_states), None

    for kind in (Halved, Noisy, Refusing, Pair):
        block.__class__ = kind
        shared_expert.merge_shared_experts(model)
        assert type(block) is kind
    block.__class__ = own
    block.extra = nn.Dropout()
    shared_expert.merge_shared_experts(model)
    assert type(block) is own


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 40, 400])
def test_the_op_on_a_gpu(tokens, bits, dtype):
    weights = parts(bits, experts=40)
    x = torch.randn(tokens, HIDDEN).to(dtype)
    ids, of = choices(tokens, 40, dtype)
    expected, magnitude = defined(x, *weights, ids, of, INTER)
    gate_up, down, *constants = weights
    moved = [adjoin([one.cuda() for one in each]) for each in (gate_up, down)]
    apart = [[one.clone() for one in each] for each in moved]
    arguments = [*(each.cuda() for each in constants), ids.cuda(), of.cuda(), INTER]
    # Gate, up, silu, their product, an expert's result and the sum are rounded.
    bound = magnitude * 8 * {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[dtype]
    for tiles in (moved, apart):
        y = ops.experts_with_shared(x.cuda(), *tiles, *arguments)
        assert bool(((y.double().cpu() - expected).abs() <= bound).all())
        for _ in range(50):
            assert torch.equal(ops.experts_with_shared(x.cuda(), *tiles, *arguments), y)


@gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [1, 3, 40, 100])
def test_models_on_a_gpu(name, tokens):
    model = build(name, dtype=torch.bfloat16).to("cuda")
    assert blocks(model)
    ids = torch.randint(0, 72, (1, tokens), device="cuda")
    with torch.no_grad():
        y = model(ids).logits
        with torch.profiler.profile() as profile:
            model(ids)
        assert any("experts_with_shared" in event.name for event in profile.events())
        torch.testing.assert_close(apart(model, ids), y, rtol=3e-2, atol=3e-2)
        assert all(torch.equal(model(ids).logits, y) for _ in range(10))


@gpu
def test_a_cuda_graph_records_a_block():
    (block,) = blocks(build("glm4_moe_lite").to("cuda"))
    x = torch.randn(1, 1, 48, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = block(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = block(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
        block.cuda()  # a move to where it is changes nothing that was recorded
        graph.replay()
        assert torch.equal(y, expected)
