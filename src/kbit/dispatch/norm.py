"""Implementation of `kbit::rms_norm`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch

from kbit.backends import cuda, reference
from kbit.dispatch.backends import backend_for, cuda_answers
from kbit.dispatch.ops import implement
from kbit.ops import direct, norm_schemas


@implement("rms_norm")
def _rms_norm(x, weight, eps, plus_one=False, round_first=True):
    norm_schemas.check(x, weight, eps)
    return _run(x, weight, eps, plus_one, round_first)


def _run(x, weight, eps, plus_one, round_first):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        # There is no CPU kernel: PyTorch's operators serve there, whichever backend multiplies.
        module = reference
        if x.is_cuda:
            module = cuda if cuda_answers(x) else backend_for("rms_norm", x.device, torch.uint8).module
        module.rms_norm(x.contiguous(), weight.contiguous(), eps, plus_one, round_first, out)
    return out


direct.set_rms_norm("cuda", cuda_answers, _run)
