"""RMS norms of a quantized model: on a GPU one kernel, `kbit::rms_norm`.

transformers writes them as eight small operators of PyTorch, which take a GPU longer than a quantized layer's
bytes, and a CPU longer to launch. torch.compile fuses them by itself and gets the class's own forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from kbit.format.versions import version_of
from kbit.nn.mixins import MixedIn, attributes, mix_in, stand_in
from kbit.nn.standing_in import trial
from kbit.nn.support import has_own_forward, is_apart
from kbit.ops import checks, direct, grad_checks

# What classes call their eps.
_EPS = ("variance_epsilon", "eps")
_PROBE_ROWS = 8
# Of a forward that a module has of its own: it is there for gradients, and computes what its class does.
FOR_GRADIENTS = "for_gradients"
_OWN_FORWARD = "_kbit_own_forward"  # of a norm: that function
_NORMED = "_kbit_normed"  # of a norm: what `add` made
Add = Callable[..., tuple[torch.Tensor, torch.Tensor]]
_PROBED = (torch.float32, torch.bfloat16, torch.float16)


class _Made(NamedTuple):
    """A sum and its norm, what the norm was made with, and the versions of sum and weight."""

    normed: torch.Tensor
    total: torch.Tensor
    weight: torch.Tensor
    how: tuple[float, bool, bool]
    versions: tuple[int, int]


class FusedNorm(MixedIn):
    """What a norm's class is mixed with. Subclasses say where it rounds, as `kbit.ops.norm_schemas`."""

    prefix = "Fused"
    passing = (_NORMED,)

    plus_one: ClassVar[bool]
    round_first: ClassVar[bool]

    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """As its own class.

        By that class's forward on a CPU, without kernels, under autocast, where anything is differentiated,
        and compiled.
        """
        if self.takes(hidden_states):
            normed = self._normed_before(hidden_states)
            if normed is not None:
                return normed
            return direct.rms_norm(hidden_states, self.weight, *self.how)
        if not torch.compiler.is_compiling():
            vars(self).pop(_NORMED, None)
        own_forward = vars(self).get(_OWN_FORWARD)
        return super().forward(hidden_states) if own_forward is None else own_forward(hidden_states)

    def add(self, x: torch.Tensor, added: Any, add_rms_norm: Add | None = None) -> torch.Tensor:
        """x + added; if one kernel can, the norm of it too, for a call of this module with the very result.

        A call with anything else, or with that after it was changed in place, does not see this one.
        `add_rms_norm` computes both, as `kbit.ops.direct.add_rms_norm`.
        """
        inferring = x.is_inference() or torch.is_inference_mode_enabled()
        if inferring or is_apart(self) or not (self.takes(x) and _is_like(added, x)):
            return x + added  # inference tensors do not say whether they were changed, nor does `x.data`
        run = add_rms_norm or direct.add_rms_norm
        weight, how = self.weight, self.how
        total, normed = run(x, added, weight, *how)
        vars(self)[_NORMED] = _Made(normed, total, weight, how, (total._version, version_of(weight)))
        return total

    def leave(self) -> None:
        """Forget the sum that `add` made, and put a forward of its own back in its place."""
        vars(self).pop(_NORMED, None)
        if _OWN_FORWARD in vars(self):
            vars(self)["forward"] = vars(self).pop(_OWN_FORWARD)

    @property
    def how(self) -> tuple[float, bool, bool]:
        """eps, plus_one and round_first of `kbit::rms_norm`."""
        return _eps(self), self.plus_one, self.round_first

    def _normed_before(self, x: torch.Tensor) -> torch.Tensor | None:
        made: _Made | None = vars(self).pop(_NORMED, None)
        if made is None or made.total is not x or made.weight is not self.weight or made.how != self.how:
            return None
        return made.normed if made.versions == (x._version, version_of(self.weight)) else None

    def takes(self, x: Any) -> bool:
        """Whether our kernel takes an input."""
        if type(x) is not torch.Tensor or torch.compiler.is_compiling() or not direct.has_rms_norm(x):
            return False  # at once on a CPU, where decoding waits for all that is asked
        weight = self._parameters.get("weight")
        if type(weight) is not nn.Parameter:
            return False
        if _eps(self) < 0:
            return False
        if x.dtype not in checks.HALF_DTYPES or x.dtype != weight.dtype or x.shape[-1:] != weight.shape:
            return False
        if (
            grad_checks.wants_grad(x, weight)
            or grad_checks.in_transform()
            or torch.is_autocast_enabled("cuda")
        ):
            return False
        return x.device == weight.device


class _RoundFirst(FusedNorm):
    plus_one, round_first = False, True


class _RoundOnce(FusedNorm):
    plus_one, round_first = False, False


class _PlusOne(FusedNorm):
    plus_one, round_first = True, False


def _eps(norm: nn.Module) -> float:
    """What a norm adds to the mean; -1 if it names none."""
    for name in _EPS:
        eps = vars(norm).get(name)
        if isinstance(eps, float):
            return eps
    return -1.0


def _columns(norm: nn.Module) -> int:
    weight = norm._parameters["weight"]
    assert weight is not None
    return weight.numel()


def _is_like(added: Any, x: torch.Tensor) -> bool:
    """Whether the sum of both has the shape of each, and no gradient is wanted."""
    if type(added) is not torch.Tensor or grad_checks.wants_grad(added):
        return False
    like = added.dtype == x.dtype and added.shape == x.shape and added.device == x.device
    return like and not added.is_neg()


def fuse_norms(model: nn.Module) -> None:
    """Have RMS norms run by our kernel, in place, where this gives what they give."""
    kinds: dict[Any, type[FusedNorm] | None] = {}
    for norm in _norms(model):
        own = vars(norm).pop("forward") if _is_for_gradients(norm) else None
        key = (type(norm), _columns(norm), attributes(norm))
        if key not in kinds:
            kinds[key] = _kind(norm)
        kind = kinds[key]
        if kind is not None:
            mix_in(norm, kind)
        if own is not None:
            vars(norm)["forward" if kind is None else _OWN_FORWARD] = own


def _is_for_gradients(norm: nn.Module) -> bool:
    """Whether a norm has a forward of its own, but for gradients alone."""
    return getattr(vars(norm).get("forward"), FOR_GRADIENTS, False)


def _norms(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that may be RMS norms: a vector of weights, an eps, one input."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        # Of the type itself: lazy layers have a weight without a shape.
        if type(weight) is not nn.Parameter or weight.dim() != 1:
            continue
        # PyTorch's own norm is one kernel already.
        if isinstance(module, MixedIn | nn.RMSNorm):
            continue
        if has_own_forward(module) and not _is_for_gradients(module):
            continue
        alone = len(module._parameters) == 1 and not module._buffers and not module._modules
        if alone and _eps(module) >= 0 and len(inspect.signature(type(module).forward).parameters) == 2:
            yield module


@trial
def _kind(norm: nn.Module) -> type[FusedNorm] | None:
    """Where a norm's class rounds, tried on numbers so small that eps counts; None if it is no RMS norm."""
    generator, own, columns = torch.Generator().manual_seed(0), type(norm), _columns(norm)
    x = torch.randn(_PROBE_ROWS, columns, generator=generator, device="cpu", dtype=torch.float32)
    weight = torch.randn(columns, generator=generator, device="cpu", dtype=torch.float32)
    eps = _eps(norm)
    x *= torch.logspace(-1, 2, len(x), device="cpu", dtype=torch.float32)[:, None] * max(eps, 1e-6) ** 0.5
    made = stand_in(norm)
    found: list[type[FusedNorm]] = [_RoundFirst, _RoundOnce, _PlusOne]
    for dtype in _PROBED:
        made._parameters = {"weight": nn.Parameter(weight.to(dtype), False)}
        want, given = own.forward(made, x.to(dtype)), (x.to(dtype), made.weight, eps)
        for kind in list(found):
            have = torch.ops.kbit.rms_norm(*given, kind.plus_one, kind.round_first)
            if want.dtype != dtype or not _same(want, have):
                found.remove(kind)
    return found[0] if found else None


def _same(want: torch.Tensor, have: torch.Tensor) -> bool:
    """Whether results are equal; in float32 but for rounding."""
    if want.dtype != torch.float32:
        return torch.equal(want, have)
    return torch.allclose(want, have, rtol=1e-5, atol=0)
