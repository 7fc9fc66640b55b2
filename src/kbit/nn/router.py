"""Routers beside quantized experts: on a GPU two kernels, for the logits and for the choice by them.

transformers' routers are a product and then 4 to 20 small kernels of PyTorch. Here they are
`kbit::moe_logits` and `kbit::moe_route`. The gate of a shared expert, a linear layer with one output, is a
router without a choice: `kbit::moe_logits` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from kbit.format.versions import version_of
from kbit.nn.experts import KbitExperts
from kbit.nn.mixins import MixedIn, attributes, mix_in, mixed, stand_in
from kbit.nn.standing_in import trial
from kbit.nn.support import has_own_forward, is_apart
from kbit.ops import direct, forms, grad_checks

_PROBE_TOKENS = 64
_MADE = "_kbit_logits"  # of a router: those that `add_rms_norm` made

# (logits [T, E], weights [T, top_k], ids int64 [T, top_k]) of a router
Choices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _has_kernels(index: int) -> bool:
    return forms.tiles_pay("grouped_linear", torch.device("cuda", index), torch.uint8)


# What torch.compiler.assume_constant_result does, which imports torch._dynamo: as long again as torch takes.
_has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


class _Made(NamedTuple):
    """Logits of a norm by a router's weight and one more row of it or none, and the versions of all three."""

    logits: torch.Tensor
    normed: torch.Tensor
    weights: tuple[torch.Tensor | None, ...]
    versions: tuple[int | None, ...]

    @classmethod
    def of(cls, logits: torch.Tensor, normed: torch.Tensor, *weights: torch.Tensor | None) -> _Made:
        """Those that were made just now."""
        return cls(logits, normed, weights, _versions(normed, *weights))

    def are_of(self, x: torch.Tensor, *weights: torch.Tensor | None) -> bool:
        """Whether x is that very norm, or all of it in another shape, and nothing has changed since."""
        same = x is self.normed or (x._base is self.normed and x.numel() == self.normed.numel())
        if not same or not x.is_contiguous() or x.shape[-1] != self.normed.shape[-1]:
            return False
        same_weights = all(mine is other for mine, other in zip(self.weights, weights, strict=True))
        return same_weights and _versions(x, *weights) == self.versions


def _versions(*tensors: torch.Tensor | None) -> tuple[int | None, ...]:
    return tuple([None if tensor is None else version_of(tensor) for tensor in tensors])


class FusedRouter(MixedIn):
    """What a router's class is mixed with. Subclasses say which router it is: `route`."""

    passing = (_MADE,)
    logits_dtype: ClassVar[torch.dtype | None] = None  # the weight's

    weight: nn.Parameter
    top_k: int

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """`Choices`, as the router's own class gives them.

        By its own forward on a CPU, without kernels, under autocast, and where anything is differentiated.
        """
        if self.takes(hidden_states):
            return self.route(hidden_states)
        self.leave()
        return super().forward(hidden_states)

    def leave(self) -> None:
        """Forget logits that were made."""
        if not torch.compiler.is_compiling():
            vars(self).pop(_MADE, None)

    def logits(self, x: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        """[T, E] of `kbit::moe_logits`, or those that are made; [T, E + 1] with `last`."""
        made = None if torch.compiler.is_compiling() else vars(self).pop(_MADE, None)
        if made is not None and made.are_of(x, self.weight, last):
            return made.logits
        return torch.ops.kbit.moe_logits(x.reshape(-1, x.shape[-1]), self.weight, self.logits_dtype, last)

    def add_rms_norm(
        self,
        last: torch.Tensor | None,
        x: torch.Tensor,
        added: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        plus_one: bool,
        round_first: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`kbit.ops.direct.add_rms_norm`; if one kernel can, with the norm's logits, for a call with that."""
        how, made = (eps, plus_one, round_first), None
        if self.takes(x) and not is_apart(self):  # who listens may change the weight before it is used
            made = direct.add_rms_norm_logits(x, added, weight, *how, self.weight, last, self.logits_dtype)
        if made is None:
            return direct.add_rms_norm(x, added, weight, *how)
        total, normed, logits = made
        vars(self)[_MADE] = _Made.of(logits, normed, self.weight, last)
        return total, normed

    def takes(self, x: torch.Tensor) -> bool:
        """Whether our kernels take an input."""
        if grad_checks.wants_grad(x, self.weight) or grad_checks.in_transform() or x.is_meta:
            return False
        plain = type(self.weight) is nn.Parameter  # and no DTensor, nor what a parametrization computes
        # Of logits in float32 the weight may be, too, as DeepSeek's family has it from transformers 5.24 on.
        alike = self.weight.dtype in (x.dtype, self.logits_dtype)
        if not plain or not alike or torch.is_autocast_enabled(x.device.type):
            return False
        return x.is_cuda and _has_kernels(x.device.index)

    def route(self, x: torch.Tensor, last: torch.Tensor | None = None, shared: str = "") -> Any:
        """What `forward` gives; of a router also with a shared expert, as `kbit.ops.moe_schemas` has it."""
        raise NotImplementedError

    def _choices(
        self,
        logits: torch.Tensor,
        scores: str,
        divided: bool,
        shared: str,
        bias: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> Choices:
        """Logits and what `kbit::moe_route` chooses by them."""
        ids, weights = torch.ops.kbit.moe_route(logits, self.top_k, scores, divided, bias, factor, shared)
        return logits, weights, ids


class _Softmax(FusedRouter):
    """The largest of a softmax, divided by their sum if the router says so."""

    norm_topk_prob: bool

    def route(self, x: torch.Tensor, last: torch.Tensor | None = None, shared: str = "") -> Choices:
        return self._choices(self.logits(x, last), "softmax", self.norm_topk_prob, shared)


class _DividedSoftmax(_Softmax):
    """The same, always divided."""

    norm_topk_prob = True


class _Float32Softmax(FusedRouter):
    """The same, always divided, with weights in float32."""

    def route(self, x: torch.Tensor, last: torch.Tensor | None = None, shared: str = "") -> Choices:
        logits = self.logits(x, last)
        return logits, *self._choices(logits.float(), "softmax", True, shared)[1:]


class _Sigmoid(FusedRouter):
    """The largest sigmoids plus a bias, in float32, not limited to groups of experts."""

    logits_dtype = torch.float32

    norm_topk_prob: bool
    routed_scaling_factor: float
    e_score_correction_bias: torch.Tensor

    def route(self, x: torch.Tensor, last: torch.Tensor | None = None, shared: str = "") -> Choices:
        bias, factor = self.e_score_correction_bias.float(), float(self.routed_scaling_factor)
        return self._choices(self.logits(x, last), "sigmoid", self.norm_topk_prob, shared, bias, factor)


class SharedGate(FusedRouter):
    """A linear layer with one output, without bias: how much the shared expert counts."""

    prefix = "Fused"

    def route(self, x: torch.Tensor, last: torch.Tensor | None = None, shared: str = "") -> torch.Tensor:
        """[..., 1]."""
        return self.logits(x).view(*x.shape[:-1], 1)


# By the name of the router's class in transformers. That it computes this is tried, too: `_computes`.
_KINDS: dict[str, type[FusedRouter]] = {
    "Qwen2MoeTopKRouter": _Softmax,
    "Qwen3MoeTopKRouter": _Softmax,
    "Qwen3NextTopKRouter": _Softmax,
    "Qwen3_5MoeTopKRouter": _DividedSoftmax,
    "OlmoeTopKRouter": _Softmax,
    "MixtralTopKRouter": _Float32Softmax,
    "DeepseekV3TopkRouter": _Sigmoid,
    "Glm4MoeTopkRouter": _Sigmoid,
    "Glm4MoeLiteTopkRouter": _Sigmoid,
}


def fuse_routers(model: nn.Module) -> None:
    """Have routers beside `KbitExperts` run by our kernels, in place, where these give what they give."""
    tried: dict[Any, bool | None] = {}
    for router in _beside_experts(model):
        if has_own_forward(router):
            continue
        if type(router) is nn.Linear and router.out_features == 1 and router.bias is None:
            mix_in(router, SharedGate)
        kind = _KINDS.get(type(router).__name__)
        if kind is None:
            continue
        key = (type(router), attributes(router), _shapes(router))
        if key not in tried:
            tried[key] = _computes(router, kind)
        if tried[key]:
            mix_in(router, kind)


def _beside_experts(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        children = list(module.children())
        if any(isinstance(child, KbitExperts) for child in children):
            yield from children


def _shapes(module: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    tensors = {**module._parameters, **module._buffers}
    return tuple((name, tensor.shape) for name, tensor in tensors.items() if tensor is not None)


@trial
def _computes(router: nn.Module, kind: type[FusedRouter]) -> bool:
    """Whether a router's class, with its attributes, does what a kind does.

    A release of transformers may change a class, and attributes may limit the choice to groups of experts.
    """
    return all(_agree(router, kind, dtype) for dtype in (torch.float32, torch.bfloat16))


def _agree(router: nn.Module, kind: type[FusedRouter], dtype: torch.dtype) -> bool:
    """Whether both give the same in a dtype, on random weights and tokens."""
    own, generator = type(router), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    tensors = {name: random(*shape) / 8 for name, shape in _shapes(router)}
    made = stand_in(router)
    made._parameters = {
        name: nn.Parameter(tensors[name].to(dtype), False) if name in tensors else None
        for name in router._parameters
    }
    made._buffers = {name: tensors.get(name) for name in router._buffers}
    hidden = tensors["weight"].shape[1]
    x = (random(_PROBE_TOKENS, hidden) * (16 / hidden**0.5)).to(dtype)
    want = own.forward(made, x)
    made.__class__ = mixed(own, kind)
    assert isinstance(made, FusedRouter)
    have = made.route(x)
    if [tensor.dtype for tensor in want] != [tensor.dtype for tensor in have]:
        return False
    # In 16 bits logits are equal now and then, and then another order is right, too.
    return dtype != torch.float32 or _equal(want, have)


def _equal(want: tuple[torch.Tensor, ...], have: tuple[torch.Tensor, ...]) -> bool:
    """Whether two routers' results are the same but for rounding and the order of choices."""
    ids, orders = zip(*(found[2].sort(-1) for found in (want, have)), strict=True)
    weights = [found[1].gather(-1, order) for found, order in zip((want, have), orders, strict=True)]
    near = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in (weights, (want[0], have[0])))
    return near and torch.equal(*ids)
