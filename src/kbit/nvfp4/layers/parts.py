"""What NVFP4 layers share: their settings, and how the parts of a weight live in an nn.Module."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kbit.backends.cuda.nvfp4 import ahead
from kbit.format.words import at
from kbit.nn.casts import without_casts
from kbit.nn.tiling import TILED, TileableModule
from kbit.nvfp4.formats import NVFP4Tensor, layouts
from kbit.nvfp4.formats.names import CODES, GLOBAL_SCALE, PARTS, SCALES
from kbit.nvfp4.gemm import TILED_ACCUMULATIONS, check_accumulation
from kbit.nvfp4.moe import DEDUP
from kbit.nvfp4.quantize import TIES, global_scale_for, quantize_nvfp4
from kbit.ops import forms, grad_checks
from kbit.ops.checks import FLOAT_DTYPES

ACTIVATIONS = ("nvfp4", "16bit")


@dataclass
class NVFP4Settings:
    """How NVFP4 layers compute.

    Attributes:
        activations: "nvfp4" (W4A4), or "16bit" (W4A16; see `linear_nvfp4`).
        accum: accumulation contract of W4A4 products, "exact", "seq16" or "tc".
        search: try neighbouring block scales, of weights and activations.
        ties: "zero" or "even".
        row_scale: give each row of activations a float32 factor. Without it, activations below 0.1 lose
            accuracy, because block scales below 2^-6 are subnormal.
        dedup: how activations are quantized for experts; changes no bit.
        fold: quantize silu(gate) * up in the kernel that computes it; changes no bit, needs row_scale off.
            Only in fused experts under W4A4 whose activation is SiLU; norms, residual sums and dense MLPs
            are the model's own and stay as they are.

    Raises:
        TypeError, ValueError: a field is out of range; the message names it.
    """

    activations: str = "nvfp4"
    accum: str = "exact"
    search: bool = True
    ties: str = "zero"
    row_scale: bool = True
    dedup: str = "indirect"
    fold: bool = False

    def __post_init__(self) -> None:
        for name, known in (("activations", ACTIVATIONS), ("ties", TIES), ("dedup", DEDUP)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        for name in ("search", "row_scale", "fold"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        check_accumulation(self.accum, "NVFP4 settings")
        if self.row_scale and (self.fold or self.dedup == "scatter"):
            raise ValueError(
                f"row_scale needs a row's largest value before its first block is quantized, so it excludes "
                f"fold and dedup='scatter'; got fold={self.fold}, dedup={self.dedup!r}. Set row_scale=False."
            )


class NVFP4Module(TileableModule):
    """What both layers share: the parts of weights as parameters without gradient.

    A weight `name` is held as `name_codes` and `name_scales` (uint8, layout nv), or on a GPU as `name_tiled`
    (see `kbit.nn.tiling`), and `name_global_scale` (float32).

    Attributes:
        settings: see `NVFP4Settings`.
        layer_name: dotted name in the model, for messages.
        shapes: {weight: its shape}.

    On a GPU a matrix's factor is fetched to the host once. Writing it through `.data` is not noticed there,
    as torch counts no version for that; write it under `torch.no_grad()`, load or move the layer instead.
    """

    settings: NVFP4Settings
    layer_name: str

    _canonical_parts = (CODES, SCALES)
    _factor = GLOBAL_SCALE

    @property
    def tileable(self) -> bool:
        """Whether this layer multiplies tiles on a GPU: not under `seq16`, but for activations of 16 bits."""
        return self.settings.activations == "16bit" or self.settings.accum in TILED_ACCUMULATIONS

    def _init_parts(
        self, shapes: dict[str, tuple[int, ...]], settings: NVFP4Settings, device: Any, layer_name: str
    ) -> None:
        self.settings, self.layer_name, self.shapes = settings, layer_name, shapes
        self._host_scales: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        for name, shape in shapes.items():
            groups = layouts.round_up(shape[-1]) // layouts.SUB_BLOCK
            codes = torch.zeros(layouts.codes_shape(shape, "nv"), dtype=torch.uint8, device=device)
            scales = torch.zeros((*shape[:-1], groups), dtype=torch.uint8, device=device)
            factor = torch.ones(shape[:-2], dtype=torch.float32, device=device)
            self._hold(name, codes, scales, factor)

    def _hold(self, name: str, *parts: torch.Tensor) -> None:
        """Have the parts of a weight, in the order of `PARTS`, as parameters."""
        for part, tensor in zip(PARTS, parts, strict=True):
            setattr(self, name + part, nn.Parameter(tensor, requires_grad=False))

    def parts(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters that hold quantized data, in layout nv."""
        self.restore()
        for name in self.shapes:
            for part in PARTS:
                yield name + part, getattr(self, name + part)

    @property
    def _arithmetic(self) -> ahead.Arithmetic:
        settings = self.settings
        accum = settings.accum if settings.activations == "nvfp4" else None
        return ahead.Arithmetic(accum, settings.search, settings.ties == "even", settings.row_scale)

    def fill(self, name: str, t: NVFP4Tensor) -> None:
        """Take over a quantized weight."""
        codes, scales = t.nv()
        factor = t.global_scale.to(codes.device)
        self._parameters.pop(name + TILED, None)
        self._host_scales.pop(name, None)
        self._hold(name, codes, scales, factor)
        self._change_to_tiles(name, force=False)

    def quantized(self, name: str) -> NVFP4Tensor:
        """A weight, sharing this layer's memory, in the form that this layer multiplies where it is."""
        tiled = self._tiles_for_call(name)
        factor = getattr(self, name + GLOBAL_SCALE)
        if factor.dim() == 0:
            factor = self._on_host(name, factor)
        if tiled is not None:
            return NVFP4Tensor(tiled.data, None, factor.data, self.shapes[name], "tiled")
        codes, scales = (getattr(self, name + part) for part in (CODES, SCALES))
        return NVFP4Tensor(codes.data, scales.data, factor.data, self.shapes[name])

    def _on_host(self, name: str, factor: torch.Tensor) -> torch.Tensor:
        """A matrix's factor on the CPU, fetched once: launches need its value, and each fetch waits."""
        # In inference mode torch counts no versions; of a transform's tensors nothing can be kept.
        if factor.is_inference() or grad_checks.in_transform():
            return factor.cpu()
        known = self._host_scales.get(name)
        if known is None or (known[0].data_ptr(), known[1]) != (factor.data_ptr(), factor._version):
            # Holding the tensor keeps its memory, so that no other factor gets the same address.
            held = factor.detach()
            known = (held, factor._version, held.cpu())
            self._host_scales[name] = known
        return known[2]

    def launched_values(self) -> Hashable:
        """Factors of matrices, or how often they were written to."""
        factors = (self._parameters.get(name + GLOBAL_SCALE) for name in self.shapes)
        return tuple(
            float(factor) if factor.is_inference() else factor._version
            for factor in factors
            if factor is not None and factor.dim() == 0
        )

    def __setstate__(self, state: Any) -> None:
        """Copied and unpickled factors count their versions anew."""
        super().__setstate__(state)
        self._host_scales = {}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move the parts with the module, but never cast them: model.half() must not touch a factor."""
        self._host_scales.clear()
        factors = (self._parameters.get(name + GLOBAL_SCALE) for name in self.shapes)
        return super()._apply(without_casts(fn, factors), recurse)

    def _before_loading(self, state_dict: Any, prefix: str) -> None:
        self._host_scales.clear()

    def _tiles_pay(self, device: torch.device) -> bool:
        return self.tileable and device.type == "cuda"

    def _may_tile(self, name: str, codes: torch.Tensor, scales: torch.Tensor, force: bool) -> bool:
        return force or (self._tiles_pay(codes.device) and forms.may_change(self, codes.device))

    def _to_tiles(self, name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return layouts.from_nv(codes, scales, "tiled")

    def _from_tiles(self, name: str, tiled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *_, rows, columns = self.shapes[name]
        return layouts.to_nv(tiled, "tiled", columns, rows)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        shapes = ", ".join(f"{name}={shape}" for name, shape in self.shapes.items())
        return f"{shapes}, activations={self.settings.activations}, accum={self.settings.accum}"


def quantize_weight(weight: torch.Tensor, settings: NVFP4Settings, where: str) -> NVFP4Tensor:
    """A 16-bit weight [N, K] or [E, N, K] in NVFP4, each matrix with global scale amax / 2688.

    Raises:
        NonFiniteError: it holds NaN or Inf.
        ValueError: it is on the meta device.
    """
    if weight.is_meta:
        raise ValueError(f"the weight is on the meta device{at(where)}. Load the model's weights first.")
    if weight.dim() == 3:
        return NVFP4Tensor.stack([quantize_weight(matrix, settings, where) for matrix in weight])
    weight = weight if weight.dtype in FLOAT_DTYPES else weight.float()
    factor = global_scale_for(weight)
    return quantize_nvfp4(
        weight, settings.search, settings.ties, global_scale=factor, check=True, where=where
    )
