"""KbitLinear: nn.Linear on a quantized weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from kbit.format import type_checks
from kbit.format.autocast import autocast
from kbit.nn import symbolic, tied
from kbit.nn.fuse import parts_of
from kbit.nn.parts import QuantizedModule
from kbit.nn.refusals import refuse_others
from kbit.nn.sizes import refuse_other_sizes
from kbit.nn.tiling import TILED
from kbit.ops import api, checks, direct, grad_checks


class KbitLinear(QuantizedModule, nn.Linear):
    """y = x @ W^T + bias with W [out_features, in_features] in 2 to 5 bits.

    A new one holds zeros; `from_linear` and `load_state_dict` fill it. The bias stays as it is. Gradients
    flow to x and to the bias, so adapters can train on top; the weight gets none.

    Args:
        in_features, out_features, bias: as in nn.Linear.
        bits: code width, 2 to 5.
        codebook: "nf", "bof", or 2^bits ascending levels with largest magnitude 1.
        absmax_format: block scale format, "e4m4", "float16" or "float32".
        device: where the weight lives.
        dtype: dtype of the bias; the weight has none of its own and computes in x's.
        name: the layer's name in its model, for error messages.

    >>> layer = KbitLinear.from_linear(nn.Linear(256, 64), bits=4)
    >>> layer(torch.randn(3, 256)).shape
    torch.Size([3, 64])
    """

    # Tensor parallelism of transformers then hands local shards to forward instead of DTensors.
    _hf_quantized_needs_local_tp = True

    _op = "linear"

    # While a module runs that has this layer among others with one input: see `kbit.nn.merged`.
    merged_call: Any = None

    bias: nn.Parameter | None  # type: ignore[assignment]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        bits: int = 4,
        codebook: str | Sequence[float] | torch.Tensor = "nf",
        absmax_format: str = "e4m4",
        device: Any = None,
        dtype: torch.dtype | None = None,
        name: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        shape = (out_features, in_features)
        self._init_parts({"weight": shape}, bits, codebook, absmax_format, device, name)
        empty = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if empty is None else nn.Parameter(empty))

    def _tiles_for_call(self, name: str) -> torch.Tensor | None:
        tiled = super()._tiles_for_call(name)
        return tied.tiles_beside(self, name) if tiled is None and self.is_tied else tiled

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.is_tied:
            tied.tiles_beside(self, loaded=True)  # which CUDA graphs read

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        tied.forget_moved(self)
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        tied.know_each_other(self)

    @property
    def local_part(self) -> str:
        """What of the layer is here: "all", "rows" or "columns" of its weight; "other" of unknown classes.

        Of rows the result is a part, and nobody wants it whole here; of columns it is a term of a sum.
        """
        return "all" if type(self) is KbitLinear else "other"

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The packed codes, int32 [out_features, ceil(in_features / 32) * bits], or the tiles, int32 too.

        PEFT asks a weight for its device, and whether its dtype is one that an adapter could have;
        transformers asks whether it is initialized, and may write to what it gets then, which is another one
        while it loads. Decoded values are in `dequantize()`.
        """
        stand_in = self._stand_in()
        if stand_in is not None:
            return stand_in
        tiled = self._held("weight")
        return self.weight_packed if tiled is None else tiled

    @classmethod
    @torch.inference_mode(False)  # gradients may be asked for later
    def from_linear(
        cls,
        linear: nn.Linear,
        bits: int = 4,
        codebook: str | Sequence[float] | torch.Tensor = "nf",
        absmax_format: str = "e4m4",
        search: bool = True,
        name: str = "",
    ) -> KbitLinear:
        """Quantize a linear layer; its bias is shared, not copied.

        Raises:
            NonFiniteWeightError: the weight holds NaN or Inf.
            TypeError, ValueError: see `kbit.quantize`; also what is no linear layer, quantized already, has a
                forward of its own, or states other sizes than its weight has.
        """
        refuse_others("KbitLinear.from_linear", linear, nn.Linear, name)
        refuse_other_sizes("KbitLinear.from_linear", linear, name)
        weight = linear.weight.detach()
        where = f"{name}.weight" if name else ""
        q = api.quantize(weight, bits, codebook, absmax_format, search, where=where)
        layer = cls.empty_like(linear, bits, absmax_format, name, device="meta")
        layer.fill("weight", parts_of(q))
        return layer

    @classmethod
    def empty_like(
        cls, linear: nn.Linear, bits: int, absmax_format: str, name: str = "", device: Any = None
    ) -> KbitLinear:
        """A layer of the same shape with empty parts and the same bias."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=False,
            bits=bits,
            absmax_format=absmax_format,
            device=linear.weight.device if device is None else device,
            name=name,
        )
        layer.register_parameter("bias", linear.bias)
        layer.training = linear.training
        return layer

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out_features, in_features] of `dtype`: the weight decoded."""
        return api.dequantize(self.quantized(), dtype)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features] of x's dtype, or of autocast's where that is on.

        Args:
            input: x, under the name that nn.Linear has for it.

        Raises:
            NotImplementedError: x or the bias has a forward-mode tangent, or torch.func differentiates.
            TypeError, ValueError: x does not fit; the message names this layer.
        """
        if not isinstance(input, torch.Tensor):
            if (node := symbolic.call_of(self, self.layer_name, KbitLinear.forward, input)) is not None:
                return node
            type_checks.tensor("linear", "x", input, self.layer_name)
        call = self.merged_call
        if call is not None and (merged := call.result_of(self, input)) is not None:
            return merged
        return self.product(input, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`forward` of this layer alone, x [..., in_features], with a bias of the caller's [out_features].

        Raises:
            NotImplementedError, TypeError, ValueError: see `forward`.
        """
        tiled: torch.Tensor | None = self._parameters.get("weight" + TILED)
        if tiled is None:
            tiled = self._tiles_for_call("weight")
        grad_checks.no_tangent("linear", self.layer_name, x, bias)
        sizes = (self.out_features, self.in_features)
        needs_grad = grad_checks.wants_grad(x, bias)
        parts = self._parts(tiled)
        if needs_grad:
            grad_checks.no_transform("linear", self.layer_name)
        elif (y := direct.linear(x, parts, bias, *sizes)) is not None:
            return y
        x = autocast(x)
        checks.activation("linear", x, self.in_features, parts[0].device, self.layer_name)
        # A model held in one dtype and fed in another still adds the bias in the activations' dtype.
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if tiled is not None:
            op = torch.ops.kbit.linear_tiled_train if needs_grad else torch.ops.kbit.linear_tiled
            return op(x, *parts, bias, *sizes)
        op = torch.ops.kbit.linear_train if needs_grad else torch.ops.kbit.linear
        return op(x, *parts, bias, self.in_features)

    def _parts(self, tiled: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The weight, of these tiles or canonical, as ops take it."""
        # Where a layer usually has them: attributes of a module take a microsecond each to find.
        parameters, buffers = self._parameters, self._buffers
        codebook, scale = buffers.get("codebook"), buffers.get("weight_scale")
        if codebook is None or scale is None:
            codebook, scale = self.codebook, self.weight_scale
        if tiled is not None:
            return tiled, codebook, scale
        packed, absmax = parameters.get("weight_packed"), parameters.get("weight_absmax")
        if packed is None or absmax is None:
            return self.weight_packed, self.weight_absmax, codebook, scale
        return packed, absmax, codebook, scale

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{nn.Linear.extra_repr(self)}, {self._describe()}"
