"""gated_delta_chunks.cu and gated_delta_rule.cu, run on the CPU, compute the gated delta rule."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from gated_delta_steps import compare_rule, of_rule, run_rule, token_by_token
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import delta_rule

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    folder = tmp_path_factory.mktemp("cuda_delta_rule_on_cpu")
    return cuda_on_cpu.Kernels(folder, cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


@pytest.mark.parametrize(
    ("room", "dtype"),  # room for three chunks at once, for two, for one
    [
        (227 << 10, torch.float16),
        (227 << 10, torch.bfloat16),
        (163 << 10, torch.float16),
        (99 << 10, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    ("batch", "tokens", "k_heads", "ratio"),
    [(2, 150, 1, 2), (1, 64, 3, 1), (1, 1, 1, 1), (1, 70, 2, 2), (1, 66, 1, 4)],
)
def test_the_rule(batch, tokens, k_heads, ratio, room, dtype, monkeypatch, kernels):
    cuda_on_cpu.install(monkeypatch, kernels, cuda_on_cpu.H200._replace(shared_bytes=room))
    for before in (False, True):
        given = of_rule(batch, tokens, k_heads, ratio, dtype, before)
        given = {name: None if value is None else guarded(value) for name, value in given.items()}
        have = run_rule(given, delta_rule, guarded)
        assert all(map(untouched, have))
        compare_rule(have, given)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_rule_of_keys_that_are_alike(dtype):
    for beta in (None, 1.0):
        given = of_rule(1, 130, 1, 2, dtype, alike=5.0)
        given["beta"] = given["beta"] if beta is None else torch.full_like(given["beta"], beta)
        compare_rule(run_rule(given, delta_rule), given, times=8)


def test_the_rule_of_chunks_is_that_of_all_of_them():
    """And a sequence is one of many; to the bit, where a chunk ends."""
    given = of_rule(2, 200, 1, 2, torch.bfloat16)
    y, state = run_rule(given, delta_rule)
    for one in range(2):
        own, before = (
            {name: value[one : one + 1] for name, value in given.items()},
            given["before"][one : one + 1],
        )
        parts = []
        for part in (slice(0, 128), slice(128, 192), slice(192, 200)):
            tokens = {name: value[:, part].contiguous() for name, value in own.items() if name != "before"}
            found, before = run_rule(tokens | {"before": before}, delta_rule)
            parts.append(found)
        assert torch.equal(torch.cat(parts, 1), y[one : one + 1])
        assert torch.equal(before, state[one : one + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_the_rule_has_learnt_it_knows_exactly(dtype):
    """Keys of one column each and no decay: the state has their values, and queries find them."""
    given = of_rule(1, 100, 1, 2, dtype, before=False)
    order = torch.randperm(128)[:100]
    given["key"] = given["query"] = torch.eye(128, dtype=dtype)[order].view(1, 100, 1, 128)
    given |= {"beta": torch.ones_like(given["beta"]), "decay": torch.zeros_like(given["decay"])}
    y, state = run_rule(given, delta_rule)
    want = torch.zeros_like(state)
    want[0, :, order] = given["value"][0].float().transpose(0, 1)
    assert torch.equal(state, want)
    assert torch.equal(y, (given["value"].float() * 128**-0.5).to(dtype))


def test_the_rule_with_gates_of_any_size():
    """Nothing is learnt with a beta of 0, and all that was is gone after a decay of e^-1000."""
    given = of_rule(1, 70, 1, 1, torch.float16)
    nothing = {name: torch.zeros_like(given[name]) for name in ("beta", "decay")}
    assert torch.equal(run_rule(given | nothing, delta_rule)[1], given["before"])
    given["decay"][:, 66] = -1000
    state = run_rule(given, delta_rule)[1]
    last = {name: given[name][:, 66:].contiguous() for name in ("query", "key", "value", "beta", "decay")}
    last["decay"][:, 0] = 0
    torch.testing.assert_close(state, token_by_token(**last, before=None)[1].float(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("odd", [{"dim": 64}, {"ratio": 5}, {"dtype": torch.float32}], ids=str)
def test_rules_that_kernels_do_not_take(odd, monkeypatch):
    monkeypatch.setattr(delta_rule.launcher, "load", None)
    given = of_rule(**{"batch": 1, "tokens": 5, "k_heads": 1, "ratio": 1, "dtype": torch.float16} | odd)
    for have, want in zip(run_rule(given, delta_rule), run_rule(given, reference), strict=True):
        assert torch.equal(have, want)
