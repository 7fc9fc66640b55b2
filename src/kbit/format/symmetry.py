"""Whether a codebook is symmetric around 0, as the default one is: 5 bits are decoded faster if it is."""

from __future__ import annotations

import weakref

import torch

from kbit.format.versions import version_of

_MOST_LEVELS_ALIKE = 16  # up to so many, kernels decode any codebook alike
_known: dict[int, tuple[weakref.ref[torch.Tensor], int, bool]] = {}


def is_symmetric(codebook: torch.Tensor) -> bool:
    """Whether kernels may take a codebook's levels for symmetric around 0; True up to 4 bits.

    The first question about a tensor of 32 levels reads it, which waits for the device; the answer is kept
    while the tensor lives unchanged. While a CUDA graph is captured nothing can be read, and what is not
    known by then is False, with which kernels are right in any case. Levels that change without torch's
    notice, by `.data` or of a tensor made in inference mode, leave the answer as it was.

    Args:
        codebook: float32 [2^bits].
    """
    if codebook.numel() <= _MOST_LEVELS_ALIKE:
        return True
    key, version = id(codebook), version_of(codebook)
    known = _known.get(key)
    if known is not None and known[0]() is codebook and known[1] == version:
        return known[2]
    if codebook.is_meta or (codebook.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    found = torch.equal(codebook, -codebook.flip(0))
    _known[key] = weakref.ref(codebook, lambda _: _known.pop(key, None)), version, found
    return found
