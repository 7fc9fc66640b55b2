"""Implementations of `kbit::rms_norm` and `kbit::add_rms_norm`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch

from kbit.backends import cuda
from kbit.backends.cuda import norm_logits
from kbit.dispatch.backends import cuda_answers, module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import direct, norm_schemas


@implement("rms_norm")
def _rms_norm(x, weight, eps, plus_one=False, round_first=True):
    norm_schemas.check(x, weight, eps)
    return _run(x, weight, eps, plus_one, round_first)


@implement("add_rms_norm")
def _add_rms_norm(x, added, weight, eps, plus_one=False, round_first=True):
    norm_schemas.check_sum(x, added, weight, eps)
    return _run_sum(x, added, weight, eps, plus_one, round_first)


def _module_for(x):
    return cuda if cuda_answers(x) else module_on_gpus("rms_norm", x.device)


def _run(x, weight, eps, plus_one, round_first):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        _module_for(x).rms_norm(x, weight.contiguous(), eps, plus_one, round_first, out)
    return out


def _run_sum(x, added, weight, eps, plus_one, round_first):
    total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    if out.numel():
        settings = weight.contiguous(), eps, plus_one, round_first
        _module_for(x).rms_norm(x, *settings, out, added.contiguous(), total)
    return total, out


def _run_logits(x, added, weight, eps, plus_one, round_first, router, last, dtype):
    if not norm_logits.takes(x, added, weight, router, last):
        return None
    total, out = torch.empty_like(x), torch.empty_like(x)
    experts = router.shape[0] + (last is not None)
    logits = x.new_empty((x.numel() // x.shape[-1], experts), dtype=dtype or x.dtype)
    how = (eps, plus_one, round_first)
    norm_logits.add_rms_norm_logits(x, added, weight, *how, router, last, total, out, logits)
    return total, out, logits


direct.norms["cuda"] = direct.Norm(cuda_answers, _run, _run_sum, _run_logits)
