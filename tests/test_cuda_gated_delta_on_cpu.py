"""gated_delta*.cu, run on the CPU, give what the reference gives, and touch nothing beside it."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from gated_delta_steps import (
    compare,
    compare_inputs,
    in_order,
    operands,
    prompt,
    run,
    run_inputs,
)
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import gated_delta
from kbit.ops import gated_delta_schemas

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    folder = tmp_path_factory.mktemp("cuda_gated_delta_on_cpu")
    return cuda_on_cpu.Kernels(folder, cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True, params=["90a", "80"])  # with clusters, and without
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels, cuda_on_cpu.H200._replace(arch=request.param))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("k_heads", "ratio"), [(1, 1), (3, 1), (2, 2)])
def test_steps(k_heads, ratio, wide, dtype):
    given = {name: guarded(value) for name, value in operands(2, k_heads, ratio, dtype, wide).items()}
    have = run(given, gated_delta, guarded)
    assert all(map(untouched, have))
    compare(have, run(given, reference))


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_projections_in_another_order(ratio):
    """All queries, all keys and so on: the same numbers. Below Hopper the reference steps with many heads."""
    given = operands(2, 2, ratio, torch.bfloat16)
    ordered = in_order(given, 2)
    for each in (reference, gated_delta):
        have = run({name: guarded(value) for name, value in ordered.items()}, each, guarded, by_heads=False)
        assert all(map(untouched, have))
        compare(have, run(given, reference))
    for tokens in (3, 40):
        given = prompt(2, tokens, 2, ratio, torch.bfloat16)
        ordered = in_order(given, 2)
        have = run_inputs(ordered, gated_delta, guarded, by_heads=False)
        assert all(map(untouched, have))
        want = run_inputs(given, reference)
        compare_inputs(have, want)
        assert all(map(torch.equal, run_inputs(ordered, reference, by_heads=False), want))
        x, norm = torch.randn_like(want[2]), torch.randn(128).bfloat16()
        heads = gated_delta_schemas.check_output(x, given["projected"], norm)
        y, wanted = torch.full_like(x, float("nan")), torch.empty_like(x)
        gated_delta.gated_delta_output(x, ordered["projected"], norm, 1e-6, False, heads, y)
        reference.gated_delta_output(x, given["projected"], norm, 1e-6, True, heads, wanted)
        torch.testing.assert_close(y, wanted, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-6)


def test_rows_apart_and_several_steps():
    given = operands(2, 2, 2, torch.bfloat16)
    for name in ("projected", "gates"):
        value = given[name]
        given[name] = torch.cat((value, torch.full_like(value, float("nan"))), 1)[:, : value.shape[1]]
    other = dict(given)
    for _ in range(3):
        have, want = run(given, gated_delta), run(other, reference)
        compare(have, want)
        for before, after in ((given, have), (other, want)):
            before["window"], before["state"] = after[1:]


def test_a_sequence_is_one_of_many():
    given = operands(3, 1, 2, torch.float16)
    all_of_them = run(given, gated_delta)
    for one in range(3):
        own = {name: given[name][one : one + 1] for name in ("projected", "gates", "window", "state")}
        for alone, together in zip(run(given | own, gated_delta), all_of_them, strict=True):
            assert torch.equal(alone[0], together[one])


@pytest.mark.parametrize("odd", [{"dim": 64}, {"taps": 3}, {"ratio": 4}, {"dtype": torch.float32}], ids=str)
def test_what_it_does_not_take_the_reference_computes(odd, monkeypatch):
    monkeypatch.setattr(gated_delta.launcher, "load", None)
    given = operands(**{"batch": 1, "k_heads": 1, "ratio": 1, "dtype": torch.float16} | odd)
    for have, want in zip(run(given, gated_delta), run(given, reference), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("k_heads", "ratio"), [(1, 1), (3, 1), (2, 2)])
def test_inputs_of_prompts(k_heads, ratio, wide, dtype, monkeypatch):
    # Fewer than taps; one thread's, one more; several threads'.
    for tokens, window in ((1, False), (3, True), (16, False), (17, True), (40, True)):
        monkeypatch.setattr(gated_delta, "_SHORT", 32 if tokens < 40 else 0)
        given = prompt(2, tokens, k_heads, ratio, dtype, wide, window=window)
        have = run_inputs(given, gated_delta, guarded)
        assert all(map(untouched, have))
        compare_inputs(have, run_inputs(given, reference))


@pytest.mark.parametrize("window", [False, True])
def test_prompts_of_which_some_tokens_are_there(window):
    # None or more than there are, too; within the first thread's, at its end, behind it.
    for batch, tokens, counts in ((2, 3, (0, 2, 3)), (2, 20, (3, 17)), (1, 40, (-1, 0, 4, 15, 16, 40, 99))):
        for count in counts:
            given = prompt(batch, tokens, 1, 2, torch.bfloat16, window=window, count=count)
            have = run_inputs(given, gated_delta, guarded)
            assert all(map(untouched, have))
            compare_inputs(have, run_inputs(given, reference))
            assert not any(gates[:, max(0, count) :].any() for gates in have[3:5])
            if batch == 1 and 4 <= count <= tokens:
                own = {name: given[name][:, :count] for name in ("projected", "gates")} | {"count": None}
                *alone, last = run_inputs(given | own, gated_delta)
                assert torch.equal(last, have[5])
                assert all(
                    torch.equal(mine, other[:, :count]) for mine, other in zip(alone, have, strict=False)
                )


def test_prompts_of_which_other_tokens_are_there():
    counts = (1, 20, 0, 7)
    given = prompt(len(counts), 20, 1, 2, torch.bfloat16, count=counts)
    have = run_inputs(given, gated_delta, guarded)
    assert all(map(untouched, have))
    for at in range(len(counts)):
        alone = {name: given[name][at : at + 1] for name in ("projected", "gates", "window", "count")}
        for mine, other in zip(run_inputs(given | alone, gated_delta), have, strict=True):
            assert torch.equal(mine[0], other[at])
    compare_inputs(have, run_inputs(given, reference))
    beside = torch.tensor(counts)[:, None].repeat(1, 2)[:, 0]
    assert all(map(torch.equal, run_inputs(given | {"count": beside}, gated_delta), have))


def test_a_prompt_in_parts_is_that_prompt():
    given = prompt(1, 50, 1, 2, torch.bfloat16)
    whole, parts, window = run_inputs(given, gated_delta), [], given["window"]
    for part in (slice(0, 1), slice(1, 20), slice(20, 50)):
        own = {name: given[name][:, part] for name in ("projected", "gates")} | {"window": window}
        *results, last = run_inputs(given | own, gated_delta)
        parts.append(results)
        window = torch.cat((window, last), -1)[..., -4:].contiguous()
    for together, pieces in zip(whole, map(list, zip(*parts, strict=True)), strict=False):
        assert torch.equal(torch.cat(pieces, 1), together)
    assert torch.equal(window, whole[5])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ratio", [1, 2])
def test_outputs_of_prompts(ratio, dtype):
    for tokens in (1, 7, 33):
        projected = prompt(2, tokens, 3, ratio, dtype)["projected"]
        x, norm = (torch.randn(shape).to(dtype) for shape in ((2, tokens, 3 * ratio, 128), (128,)))
        heads = gated_delta_schemas.check_output(x, projected, norm)
        have, want = guarded(torch.full_like(x, float("nan"))), torch.empty_like(x)
        gated_delta.gated_delta_output(x, projected, norm, 1e-6, True, heads, have)
        assert untouched(have)
        reference.gated_delta_output(x, projected, norm, 1e-6, True, heads, want)
        torch.testing.assert_close(have, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)
        assert (have != want).sum() <= 2 + have.numel() // 50


@pytest.mark.parametrize("odd", [{"dim": 64}, {"taps": 3}, {"ratio": 4}, {"dtype": torch.float32}], ids=str)
def test_prompts_that_kernels_do_not_take(odd, monkeypatch):
    monkeypatch.setattr(gated_delta.launcher, "load", None)
    given = prompt(**{"batch": 1, "tokens": 5, "k_heads": 1, "ratio": 1, "dtype": torch.float16} | odd)
    for have, want in zip(run_inputs(given, gated_delta), run_inputs(given, reference), strict=True):
        assert torch.equal(have, want)
