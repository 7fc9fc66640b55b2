"""gated_delta.cu, run on the CPU, gives what the reference gives, and touches nothing beside it."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from gated_delta_steps import compare, operands, run
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import gated_delta

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
