"""NVFP4Linear: a linear layer with an NVFP4 weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.nvfp4 import ahead
from kbit.nn.sizes import refuse_other_sizes
from kbit.nvfp4 import no_gradient
from kbit.nvfp4.gemm import gemm_nvfp4, linear_nvfp4
from kbit.nvfp4.layers.parts import NVFP4Module, NVFP4Settings, quantize_weight
from kbit.nvfp4.quantize import quantize_nvfp4
from kbit.ops import checks


class NVFP4Linear(NVFP4Module):
    """Replaces nn.Linear.

    Attributes:
        in_features, out_features, bias: as in nn.Linear.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        settings: NVFP4Settings,
        device: Any = None,
        layer_name: str = "",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._init_parts({"weight": (out_features, in_features)}, settings, device, layer_name)
        self.bias: nn.Parameter | None = None

    @classmethod
    def empty_like(
        cls, linear: nn.Linear, settings: NVFP4Settings, name: str = "", device: Any = None
    ) -> NVFP4Linear:
        """A layer of the same shape and bias, its weight still empty."""
        device = linear.weight.device if device is None else device
        layer = cls(linear.in_features, linear.out_features, settings, device, name)
        layer.bias = linear.bias
        return layer

    @classmethod
    def from_linear(cls, linear: nn.Linear, settings: NVFP4Settings, name: str = "") -> NVFP4Linear:
        """Quantize a layer's weight; its bias is shared.

        Raises:
            NonFiniteError: the weight holds NaN or Inf.
            ValueError: the layer states other sizes than its weight has.
        """
        refuse_other_sizes("NVFP4Linear.from_linear", linear, name)
        layer = cls.empty_like(linear, settings, name, device="meta")
        layer.fill("weight", quantize_weight(linear.weight.detach(), settings, name))
        return layer

    def kernels_ahead(
        self, tokens: Sequence[int], dtype: torch.dtype, device: DeviceLimits
    ) -> list[KernelSpec]:
        """See `kbit.nn.ahead.KnowsKernels`."""
        return ahead.of_linear(self.out_features, self.in_features, self._arithmetic, tokens, dtype, device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features] of x's dtype.

        Args:
            input: x, under the name that nn.Linear has for it.

        Raises:
            NotImplementedError: W4A4 is to be differentiated in x: at once if forwards or by torch.func, else
                by backward(); or it is called in torch.vmap.
            TypeError, ValueError: x does not fit; the message names this layer.
        """
        x = input
        checks.activation("linear", x, self.in_features, self._device_of("weight"), self.layer_name)
        if self.settings.activations == "nvfp4":
            no_gradient.refuse_transforms(no_gradient.LAYERS, self.layer_name, x)
        weight = self.quantized("weight")
        bias: torch.Tensor | None = self.bias
        # A model held in one dtype and fed in another still adds the bias in the activations' dtype.
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        if self.settings.activations == "16bit":
            return linear_nvfp4(x, weight, bias, self.layer_name)
        rows = x.detach().reshape(-1, x.shape[-1])
        settings = self.settings
        a = quantize_nvfp4(rows, settings.search, settings.ties, settings.row_scale, where=self.layer_name)
        y = gemm_nvfp4(a, weight, settings.accum, x.dtype, where=self.layer_name)
        y = no_gradient.without_gradient(y, no_gradient.LAYERS, self.layer_name, x)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if bias is None else y + bias
