"""The ops of gated delta attention: checks, what transformers' layers compute, and the GPU's kernels."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import kbit
from gated_delta_steps import (
    compare,
    compare_inputs,
    compare_rule,
    in_order,
    of_rule,
    operands,
    prompt,
    run,
    run_inputs,
    run_rule,
)
from kbit.backends import reference
from kbit.backends.cuda import gated_delta
from kbit.integrations.transformers import linear_attention
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.integrations.transformers.step_kernels import step_kernels
from kbit.nn import delta_families
from kbit.nn import gated_delta as layers
from kbit.ops import gated_delta_schemas
from tiny_models import ARCHITECTURES, build

op = torch.ops.kbit.gated_delta_step
GIVEN = operands(2, 2, 2, torch.float16, dim=8, taps=3)
OF_PROMPT = prompt(2, 5, 2, 2, torch.float16, dim=8, taps=3)
OF_RULE = of_rule(2, 5, 2, 2, torch.float16, dim=8)
DIM = 16  # of heads of the tiny model
LINEAR = ["qwen3_next", "qwen3_5_moe"]  # models with linear attention
PROMPTS = ["whole", "parts", "one token first", "then steps", "masked", "no cache"]


class Op:
    """The op, called as a backend is."""

    @staticmethod
    def gated_delta_step(**named):
        out = named.pop("out")
        out.copy_(op(**named))

    @staticmethod
    def gated_delta_inputs(*given):
        *given, _, out = given
        for to, result in zip(out, torch.ops.kbit.gated_delta_inputs(*given), strict=True):
            to.copy_(result)

    @staticmethod
    def gated_delta_rule(*given):
        *given, _, out = given
        for to, result in zip(out, torch.ops.kbit.gated_delta_rule(*given), strict=True):
            to.copy_(result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_on_a_cpu_it_is_the_reference(dtype):
    given = operands(2, 2, 2, dtype, dim=8, taps=3)
    for have, want in zip(run(given, Op), run(given, reference), strict=True):
        assert torch.equal(have, want)


def test_opcheck():
    torch.library.opcheck(op.default, (*GIVEN.values(), 1e-6))
    for more in ({}, {"count": torch.tensor([3, 5])}):
        given = tuple((OF_PROMPT | more).values())
        torch.library.opcheck(torch.ops.kbit.gated_delta_inputs.default, given)
    for before in (None, OF_RULE["before"]):
        given = tuple((OF_RULE | {"before": before}).values())
        torch.library.opcheck(torch.ops.kbit.gated_delta_rule.default, given)
    x = torch.randn(2, 5, 4, 8).half()
    given = (x, OF_PROMPT["projected"], GIVEN["norm"], 1e-6)
    torch.library.opcheck(torch.ops.kbit.gated_delta_output.default, given)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"projected": OF_PROMPT["projected"].long()}, TypeError, "projected"),
        ({"projected": OF_PROMPT["projected"][0]}, ValueError, r"must be \[B, T, P\]"),
        ({"projected": OF_PROMPT["projected"][..., :-8]}, ValueError, "as many heads of keys as divide them"),
        ({"gates": OF_PROMPT["gates"][:, :4]}, ValueError, r"gates must be \[2, 5, 8\]"),
        ({"window": OF_PROMPT["window"][..., :2]}, ValueError, r"window must be \[2, 64, 3\]"),
        ({"bias": OF_PROMPT["bias"].float()}, TypeError, "bias must be torch.float16"),
        ({"taps": OF_PROMPT["taps"].to("meta")}, ValueError, "taps is on meta"),
        ({"count": torch.tensor([2.0])}, TypeError, "count must be torch.int64"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_prompts_that_do_not_belong_together_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        torch.ops.kbit.gated_delta_inputs(*(OF_PROMPT | change).values())


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_rule_on_a_cpu(dtype, before):
    for tokens in (1, 64, 130):
        given = of_rule(2, tokens, 2, 2, dtype, before, dim=24)
        compare_rule(run_rule(given, Op), given)
    strided = {name: None if value is None else value.mT.contiguous().mT for name, value in given.items()}
    assert not any(strided[name].is_contiguous() for name in ("query", "key", "value", "beta", "decay"))
    assert all(map(torch.equal, run_rule(strided, Op), run_rule(given, Op)))


@pytest.mark.parametrize("before", [False, True])
def test_the_rule_of_no_tokens(before):
    given = of_rule(2, 0, 1, 2, torch.float16, before, dim=8)
    y, state = run_rule(given, Op)
    assert y.shape == (2, 0, 2, 8)
    assert torch.equal(state, given["before"] if before else torch.zeros(2, 2, 8, 8))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": OF_RULE["query"].long()}, TypeError, "query"),
        ({"query": OF_RULE["query"][0]}, ValueError, r"query must be \[B, T, H, D\]"),
        (
            {"value": OF_RULE["value"][:, :, :3]},
            ValueError,
            r"H dividing V, got \(2, 5, 2, 8\) and \(2, 5, 3, 8\)",
        ),
        ({"key": OF_RULE["key"][:, :4]}, ValueError, r"key must be \[2, 5, 2, 8\]"),
        ({"beta": OF_RULE["beta"].float()}, TypeError, "beta must be torch.float16"),
        ({"decay": OF_RULE["decay"].half()}, TypeError, "decay must be torch.float32"),
        ({"before": OF_RULE["before"][:1]}, ValueError, r"before must be \[2, 4, 8, 8\]"),
        ({"before": OF_RULE["before"].to("meta")}, ValueError, "before is on meta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_rules_that_do_not_belong_together_are_refused(change, error, words):
    with pytest.raises(error, match=words):
        torch.ops.kbit.gated_delta_rule(*(OF_RULE | change).values())


def test_outputs_that_do_not_belong_together_are_refused():
    x, projected, norm = torch.zeros(2, 5, 4, 8).half(), OF_PROMPT["projected"], GIVEN["norm"]
    run_output = torch.ops.kbit.gated_delta_output
    for given, words in (
        ((x[0], projected, norm), r"x must be \[B, T, V, D\]"),
        ((x, projected[:, :4], norm), r"projected must be \[2, 5, 96\]"),
        ((x, projected[..., :64], norm), "as many heads of keys as divide them"),
        ((x, projected, norm[:4]), r"norm must be \[8\]"),
    ):
        with pytest.raises(ValueError, match=words):
            run_output(*given, 1e-6)
    with pytest.raises(TypeError, match="projected must be torch.float16"):
        run_output(x, projected.float(), norm, 1e-6)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"projected": GIVEN["projected"].long()}, TypeError, "projected"),
        ({"projected": GIVEN["projected"][:, :-8]}, ValueError, r"projected must be \[2, 80\]"),
        ({"projected": GIVEN["projected"][:, :64]}, ValueError, "as many heads of keys as divide them"),
        ({"gates": GIVEN["gates"].float()}, TypeError, "gates must be torch.float16"),
        ({"gates": GIVEN["gates"][:1]}, ValueError, r"gates must be \[2, 8\], got \[1, 8\]"),
        ({"state": GIVEN["state"].half()}, TypeError, "state must be torch.float32"),
        ({"state": GIVEN["state"][..., :4]}, ValueError, r"\[B, V, D, D\]"),
        ({"state": GIVEN["state"].transpose(2, 3)}, ValueError, "state is written in place"),
        ({"window": GIVEN["window"][..., :2]}, ValueError, r"taps must be \[64, 2\]"),
        ({"log_decay": GIVEN["log_decay"].float()}, TypeError, "log_decay must be torch.float16"),
        ({"norm": torch.ones(8, dtype=torch.float16, device="meta")}, ValueError, "norm is on meta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        op(**(GIVEN | change), eps=1e-6)


@pytest.fixture
def ran(monkeypatch):
    """The names of ops that ran."""
    ran = []

    def counting(name):
        run = getattr(torch.ops.kbit, name)
        return lambda *given: ran.append(name) or run(*given)

    for name in ("gated_delta_step", "gated_delta_inputs", "gated_delta_rule", "gated_delta_output"):
        monkeypatch.setattr(torch.ops.kbit, name, counting(name))
    return ran


@pytest.fixture
def by_ops(ran, monkeypatch):
    """The same; layers on a CPU, too, go by them."""
    monkeypatch.setattr(layers, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(gated_delta, "DIM", DIM)
    return ran


def tiny(architecture="qwen3_next"):
    model = build(architecture, torch.float32, spread=False).eval()
    assert model.config.linear_key_head_dim == DIM
    return model


def behind_a_prompt(model, device):
    """A cache that holds a prompt, and the next tokens."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids = torch.tensor([[3, 5, 7, 2, 9], [2, 4, 6, 8, 1]], device=device)
    model(ids, **with_cache(cache))
    return cache, torch.tensor([[1], [4]], device=device)


def logits_of_steps(model, device):
    """Of a prompt's next three tokens."""
    steps = []
    cache, token = behind_a_prompt(model, device)
    for _ in range(3):
        steps.append(model(token, **with_cache(cache)).logits)
        token = (token + 5) % 32
    return torch.stack(steps)


def logits_of_prompts(model, device, how):
    """Of a prompt of 2 x 70 tokens: whole, in parts, behind one token, with some of it masked, or alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32, (2, 70), generator=generator).to(device)
    if how == "no cache":
        return model(ids, use_cache=False).logits
    if how == "masked":
        mask = torch.ones_like(ids)
        mask[1, :9] = 0
        return model(ids, attention_mask=mask).logits[mask.bool()]
    sizes = {"whole": [70], "parts": [2, 65, 3], "one token first": [1, 69], "then steps": [67, 1, 1, 1]}[how]
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, **with_cache(cache)).logits for part in ids.split(sizes, 1)], 1)


@pytest.mark.parametrize("architecture", LINEAR)
def test_layers_of_transformers_compute_the_same(architecture, by_ops):
    model = tiny(architecture)
    with torch.no_grad():
        own = logits_of_steps(model, "cpu")
        assert not by_ops
        with linear_attention.fused_linear_attention():
            fused = logits_of_steps(model, "cpu")
    prompts = {"gated_delta_inputs", "gated_delta_rule", "gated_delta_output"}
    assert set(by_ops) == {"gated_delta_step", *prompts}
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("architecture", LINEAR)
@pytest.mark.parametrize("how", PROMPTS)
def test_prompts_of_quantized_models(how, architecture, by_ops):
    """Layers of quantized models go by the ops without being asked to."""
    model = tiny(architecture)
    policy = kbit.QuantizationPolicy(bits=4, search=False)
    with torch.no_grad():
        kbit.quantize_model(model, policy)
        merged = [module for module in model.modules() if isinstance(module, layers.MergedGatedDelta)]
        fused = logits_of_prompts(model, "cpu", how)
        assert by_ops.count("gated_delta_output") >= len(merged) > 0
        for layer in merged:
            layer.__class__ = layer.own
        by_ops.clear()
        own = logits_of_prompts(model, "cpu", how)
    assert not by_ops
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_layers_of_a_derived_class(by_ops):
    model = tiny()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    layer.__class__ = type("Derived", (type(layer),), {})
    own = logits_of_steps(model, "cpu")
    with linear_attention.fused_linear_attention():
        fused = logits_of_steps(model, "cpu")
    assert "gated_delta_rule" in by_ops
    torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-5)


def test_what_has_a_family():
    layer = next(module for module in tiny().modules() if hasattr(module, "A_log"))
    assert delta_families.family_of(layer).by_heads
    assert delta_families.layout_of(layer) == (True, 2)
    # Somebody else's, of the same name.
    assert delta_families.family_of(type("Qwen3NextGatedDeltaNet", (torch.nn.Module,), {})()) is None
    assert delta_families.layout_of(layer.norm) is None


@pytest.mark.parametrize(("arch", "ratios"), [("80", (1, 2)), ("89", (1, 2)), ("90a", (1, 2, 3, 4))])
def test_steps_that_one_kernel_computes(arch, ratios):
    assert tuple(ratio for ratio in (1, 2, 3, 4) if gated_delta.takes_steps(ratio, arch)) == ratios


def test_a_layer_that_stays_as_it_is():
    """One with a projection that is not quantized, or a forward of other arguments."""
    model = tiny()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    layers.merge_gated_delta(model)
    assert not isinstance(layer, layers.MergedGatedDelta)
    layer.__class__ = type(
        "Qwen3NextGatedDeltaNet", (type(layer),), {"forward": lambda self, hidden_states: None}
    )
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    assert not isinstance(layer, layers.MergedGatedDelta)


def test_prompts_that_are_left_to_the_class(by_ops):
    """With gradients, of packed sequences, or in a cache that records its past."""
    model = tiny()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    x = torch.zeros(1, 5, model.config.hidden_size)
    assert layers.by_kernels(layer, x, None, None, {}) is None
    with torch.no_grad():
        assert layers.by_kernels(layer, x, None, None, {"cu_seq_lens_q": torch.tensor([0, 2, 5])}) is None
        cache = DynamicCache(config=model.config)
        cache.layers[layer.layer_idx].activate_past_recording()
        assert layers.by_kernels(layer, x, cache, None, {}) is None
        for other in (object(), DynamicCache()):  # of another kind, or without this layer
            assert layers.by_kernels(layer, x, other, None, {}) is None
        assert not by_ops
        assert layers.by_kernels(layer, x, None, None, {"cu_seq_lens_q": None}) is not None


def test_other_devices_keep_their_own(monkeypatch):
    model = tiny()
    for name in ("gated_delta_step", "gated_delta_inputs"):
        monkeypatch.setattr(torch.ops.kbit, name, None)
    with torch.no_grad(), step_kernels(model):
        cache, token = behind_a_prompt(model, "cpu")
        model(token, **with_cache(cache))


def unlike(layer, how):
    """A layer of which one thing is not what the kernel takes."""
    if how == "activation":
        layer.norm.activation = "sigmoid"
    elif how == "bias":
        layer.conv1d.bias = torch.nn.Parameter(torch.zeros(layer.conv1d.weight.shape[0]))
    elif how == "weight":
        layer.norm.double()
    elif how == "gates":
        layer.A_log.data = layer.A_log.data.double()
    elif how == "offloaded":
        layer.conv1d.to("meta")
    elif how == "hook":
        layer.norm.register_forward_hook(lambda *given: None)
    elif how == "class":
        layer.norm.__class__ = type("HalfRMSNormGated", (type(layer.norm),), {})


@pytest.mark.parametrize(
    "how", ["", "activation", "bias", "weight", "gates", "offloaded", "hook", "class", "width"]
)
def test_layers_that_the_kernel_does_not_take(how, by_ops, monkeypatch):
    model = tiny()
    layer = next(module for module in model.modules() if hasattr(module, "A_log"))
    with torch.no_grad():
        cache, _ = behind_a_prompt(model, "cpu")
        if how == "width":
            monkeypatch.setattr(gated_delta, "DIM", 128)
        unlike(layer, how)
        x = torch.zeros(2, 1, model.config.hidden_size)
        by_ops.clear()
        for tokens in (x, torch.cat((x, x), 1)):
            assert (layers.by_kernels(layer, tokens, cache, None, {}) is None) == bool(how)
        assert layers.by_kernels(layer, x, cache, torch.ones(2, 1), {}) is None
    assert len(by_ops) == (0 if how else 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("batch", "k_heads", "ratio"), [(1, 16, 2), (3, 5, 1), (32, 16, 2)])
def test_on_a_gpu(batch, k_heads, ratio, wide, dtype):
    given = {name: value.cuda() for name, value in operands(batch, k_heads, ratio, dtype, wide).items()}
    have = run(given, Op)
    compare(have, run(given, reference))
    for _ in range(200):
        assert all(map(torch.equal, run(given, Op), have))
    torch.library.opcheck(op.default, (*given.values(), 1e-6))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("batch", "tokens", "k_heads", "ratio"), [(1, 2048, 16, 2), (3, 129, 5, 1), (2, 3, 16, 2)]
)
def test_prompts_on_a_gpu(batch, tokens, k_heads, ratio, wide, dtype):
    for window, count in ((False, None), (True, None), (False, tokens * 2 // 3)):
        given = prompt(batch, tokens, k_heads, ratio, dtype, wide, window=window, count=count)
        given = {name: None if value is None else value.cuda() for name, value in given.items()}
        have = run_inputs(given, Op)
        compare_inputs(have, run_inputs(given, reference))
        x, norm = torch.randn_like(have[2]), torch.randn(128, device="cuda", dtype=dtype)
        operands_of_output = (x, given["projected"], norm)
        y, want = torch.ops.kbit.gated_delta_output(*operands_of_output, 1e-6), torch.empty_like(x)
        heads = gated_delta_schemas.check_output(*operands_of_output)
        reference.gated_delta_output(*operands_of_output, 1e-6, True, heads, want)
        torch.testing.assert_close(y, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        for _ in range(50):
            assert all(map(torch.equal, run_inputs(given, Op), have))
            assert torch.equal(torch.ops.kbit.gated_delta_output(*operands_of_output, 1e-6), y)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_projections_in_another_order_on_a_gpu(ratio):
    def moved(given):
        return {name: None if value is None else value.cuda() for name, value in given.items()}

    step = operands(3, 16, ratio, torch.bfloat16)
    have = run(moved(in_order(step, 16)), Op, by_heads=False)
    compare(have, run(moved(step), reference))
    for tokens in (5, 1100):
        given = prompt(2, tokens, 16, ratio, torch.bfloat16)
        ordered, given = moved(in_order(given, 16)), moved(given)
        made, want = run_inputs(ordered, Op, by_heads=False), run_inputs(given, reference)
        compare_inputs(made, want)
        x, norm = torch.randn_like(want[2]), torch.randn(128, device="cuda").bfloat16()
        heads, y = gated_delta_schemas.check_output(x, given["projected"], norm), torch.empty_like(x)
        reference.gated_delta_output(x, given["projected"], norm, 1e-6, True, heads, y)
        opened = torch.ops.kbit.gated_delta_output(x, ordered["projected"], norm, 1e-6, False)
        torch.testing.assert_close(opened, y, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6)
        for _ in range(50):
            assert all(map(torch.equal, run_inputs(ordered, Op, by_heads=False), made))
            assert all(map(torch.equal, run(moved(in_order(step, 16)), Op, by_heads=False), have))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "tokens", "k_heads", "ratio"),
    [
        (1, 2048, 16, 2),
        (3, 129, 5, 1),
        (2, 3, 16, 2),
        (1, 64, 1, 1),
        (40, 65, 2, 2),
        (1, 200, 16, 3),
        (1, 70, 4, 4),
    ],
)
def test_the_rule_on_a_gpu(batch, tokens, k_heads, ratio, dtype):
    for before in (True, False):
        given = of_rule(batch, tokens, k_heads, ratio, dtype, before)
        given = {name: None if value is None else value.cuda() for name, value in given.items()}
        have = run_rule(given, Op)
        compare_rule(have, given)
        for _ in range(200):
            assert all(map(torch.equal, torch.ops.kbit.gated_delta_rule(*given.values()), have))


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", LINEAR)
@pytest.mark.parametrize("how", PROMPTS)
def test_prompts_of_models_on_a_gpu(how, architecture, ran):
    """Heads of 128 columns, in 16 bits: as near to the class's own result as that is to float32's."""
    torch.manual_seed(0)
    config = ARCHITECTURES[architecture]()
    config.linear_key_head_dim = config.linear_value_head_dim = 128
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().cuda()
    with torch.no_grad():
        exact = logits_of_prompts(model, "cuda", how)
        model.bfloat16()
        own = logits_of_prompts(model, "cuda", how).float()
        assert not ran
        with linear_attention.fused_linear_attention():
            fused = logits_of_prompts(model, "cuda", how).float()
    assert "gated_delta_output" in ran
    assert (fused - exact).norm() <= 1.2 * (own - exact).norm() + 1e-3
