"""`kbit::latent_heads`: what transformers' operators make, and the kernel."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import latent_prompts as kernels
from test_rotary import defined

op = torch.ops.kbit.latent_heads
NAMES = ("query", "expanded", "key", "cos", "sin")


def operands(batch, tokens, heads, own, turned, values, dtype=torch.float32, angles=None):
    """As layers have them: key and query are parts of wider rows."""

    def normal(*shape):
        return torch.randn(shape).to(dtype)

    latents = normal(batch, tokens, 16 + turned)
    query = normal(batch, tokens, heads, own + turned)
    expanded = normal(batch, tokens, heads, own + values)
    made = query, expanded, latents[..., 16:], *normal(2, angles or batch, tokens, turned)
    return dict(zip(NAMES, made, strict=True))


def expected(query, expanded, key, cos, sin, interleaved):
    """query turned, keys and the turned key in transformers' words."""
    own = query.shape[3] - key.shape[2]
    turned = defined(key[:, None], cos, sin, interleaved)
    its_query = defined(query[..., own:].transpose(1, 2), cos, sin, interleaved).transpose(1, 2)
    keys = torch.cat((expanded[..., :own], turned.transpose(1, 2).expand_as(its_query)), -1)
    return torch.cat((query[..., :own], its_query), -1), keys, turned[:, 0]


def run(tensors, interleaved, call=op):
    """What the op makes: query with others, keys, the turned key."""
    tensors = tensors | {"query": tensors["query"].clone()}
    return tensors["query"], *call(*tensors.values(), interleaved)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(1, 4, 2), (2, 3, 1), (3, 1, 5), (0, 2, 2), (1, 0, 2)]),
    st.sampled_from([(8, 8, 8), (3, 2, 5), (0, 6, 4), (64, 64, 128)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
)
def test_the_definition(shape, columns, dtype, one_angle, interleaved):
    tensors = operands(*shape, *columns, dtype, angles=1 if one_angle else None)
    for have, want in zip(
        run(tensors, interleaved), expected(**tensors, interleaved=interleaved), strict=True
    ):
        assert torch.equal(have, want)
        assert have.is_contiguous()


def test_opcheck():
    for interleaved in (False, True):
        given = (*operands(2, 3, 2, 8, 8, 8).values(), interleaved)
        torch.library.opcheck(op.default, given)


GIVEN = operands(2, 3, 4, 8, 8, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": GIVEN["query"].long()}, TypeError, "query"),
        ({"query": GIVEN["query"][0]}, ValueError, "must have 4, 4, 3 and 3 dimensions"),
        ({"expanded": GIVEN["expanded"][..., :7]}, ValueError, "must have 8 columns or more, got 7"),
        ({"expanded": GIVEN["expanded"][:, :, :3]}, ValueError, r"expanded must be \[2, 3, 4, 16\]"),
        ({"key": GIVEN["key"][..., :7]}, ValueError, "even number of columns up to query's 16, got 7"),
        ({"key": GIVEN["key"].half()}, TypeError, "key must be torch.float32"),
        ({"cos": GIVEN["cos"][:, :2]}, ValueError, r"cos must be \[2, 3, 8\]"),
        ({"sin": GIVEN["sin"].to("meta")}, ValueError, "sin is on meta"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        op(*(GIVEN | change).values(), False)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda_latent_heads_on_cpu")
    return cuda_on_cpu.Kernels(folder, cuda_rows_on_cpu.host_source)


def by_kernel(*given):
    """The kernel, in place of the op, between guards."""
    query, expanded, key, cos, sin, interleaved = given
    out = [guarded(torch.full_like(one, float("nan")).contiguous()) for one in (query, key)]
    kernels.latent_heads(query, expanded, key, cos, sin, interleaved, *out)
    assert all(map(untouched, out))
    return out


@pytest.mark.skipif(
    cuda_on_cpu.unavailable_reason() is not None, reason=str(cuda_on_cpu.unavailable_reason())
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_kernel(dtype, interleaved, compiled, monkeypatch):
    cuda_on_cpu.install(monkeypatch, compiled)
    # GLM's heads, of which some blocks' last warp has none; DeepSeek's; without columns of their own.
    for shape, columns in (
        ((2, 5, 3), (192, 64, 256)),
        ((1, 3, 2), (128, 64, 128)),
        ((1, 2, 3), (0, 64, 32)),
    ):
        tensors = operands(*shape, *columns, dtype, angles=1)
        tensors["query"] = guarded(tensors["query"])
        have = run(tensors, interleaved, by_kernel)
        for mine, want in zip(have, expected(**tensors, interleaved=interleaved), strict=True):
            assert torch.equal(mine, want)


@pytest.mark.parametrize("odd", [{"turned": 32}, {"own": 40}, {"dtype": torch.float32}], ids=str)
def test_what_the_kernel_does_not_take_the_reference_computes(odd, monkeypatch):
    monkeypatch.setattr(kernels.launcher, "load", None)
    tensors = operands(
        **{"batch": 1, "tokens": 3, "heads": 2, "own": 64, "turned": 64, "values": 8, "dtype": torch.float16}
        | odd
    )
    for mine, want in zip(run(tensors, True, by_kernel), expected(**tensors, interleaved=True), strict=True):
        assert torch.equal(mine, want)
    assert reference.latent_heads is not kernels.latent_heads


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "columns"), [((1, 2048, 20), (192, 64, 256)), ((3, 77, 16), (128, 64, 128))]
)
def test_on_a_gpu(shape, columns, dtype, interleaved):
    tensors = {name: one.cuda() for name, one in operands(*shape, *columns, dtype).items()}
    want = expected(**tensors, interleaved=interleaved)
    for _ in range(200):
        assert all(map(torch.equal, run(tensors, interleaved), want))
