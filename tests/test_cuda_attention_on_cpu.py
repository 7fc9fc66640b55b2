"""attention_step.cu, run on the CPU, gives what attention is, and touches nothing beside it."""

from __future__ import annotations

import pytest
import torch

import attention_steps
import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import attention
from kbit.backends.cuda.driver import DeviceLimits

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

SMALL = DeviceLimits(multiprocessors=16, shared_bytes=99 * 1024, arch="120")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_attention_on_cpu"), cuda_rows_on_cpu.host_source)


def run(tensors, how, monkeypatch, kernels, device=cuda_on_cpu.H200):
    """The op's result and caches by the kernel, which touched nothing else."""
    cuda_on_cpu.install(monkeypatch, kernels, device)
    given = {name: None if one is None else guarded(one.clone()) for name, one in tensors.items()}
    given["length"] = tensors["length"]
    out = guarded(torch.full_like(tensors["query"].contiguous(), float("nan")))
    attention.attention_step(*given.values(), *how, out)
    written = out, given["keys"], given["values"]
    assert all(map(untouched, written))
    return written


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "heads", "columns", "turned", "room", "lengths", "how"),
    [
        (2, (4, 2), 64, 64, 70, (0, 15, 16, 69, 70, 75), attention_steps.HOW),
        (1, (12, 1), 128, 32, 300, (17, 299), (0.07, 1e-5, True, False)),  # 8 heads of a head of keys, and 4
        (2, (16, 2), 256, 64, 150, (149,), attention_steps.HOW),
        (1, (3, 3), 128, 128, 400, (390,), attention_steps.HOW),
        (1, (9, 1), 64, 32, 2050, (0, 700, 2049, 2050), attention_steps.HOW),  # clusters of 16 blocks
    ],
)
def test_steps(batch, heads, columns, turned, room, lengths, how, dtype, monkeypatch, kernels):
    torch.manual_seed(columns)
    for length in lengths:
        for mask, device in ((True, cuda_on_cpu.H200), (False, SMALL)):
            options = {"length": length, "room": room, "mask": mask, "gate": mask, "norms": mask}
            tensors = attention_steps.operands(batch, heads, columns, turned, dtype, **options)
            written = run(tensors, how, monkeypatch, kernels, device)
            attention_steps.require(*written, tensors, how)


def test_all_tokens_count_where_the_mask_is_the_least_number_everywhere(monkeypatch, kernels):
    tensors = attention_steps.operands(1, (2, 1), 64, 64, torch.bfloat16, length=40, norms=False)
    tensors["mask"].fill_(torch.finfo(torch.bfloat16).min)
    out, _, values = run(tensors, attention_steps.HOW, monkeypatch, kernels)
    mean = values[:, :, :41].float().mean(2).expand_as(out)
    assert torch.allclose(out.float(), mean, atol=0.02)


def test_a_head_without_numbers_stays_without(monkeypatch, kernels):
    tensors = attention_steps.operands(1, (2, 1), 64, 64, torch.float16, length=40, norms=False)
    tensors["query"][0, 1, 3] = float("nan")
    out, *_ = run(tensors, attention_steps.HOW, monkeypatch, kernels)
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()
    reference.attention_step(*tensors.values(), *attention_steps.HOW, want := torch.empty_like(out))
    assert torch.equal(want.isnan(), out.isnan())
