"""What every quantized layer shares: how the parts of a quantized weight live in an nn.Module.

For a weight called `weight` a layer holds `weight_packed`, `weight_absmax` (parameters without gradient) and
`weight_scale` (float32; a parameter where some matrix's factor is not 1, else a buffer that is not saved),
and one `codebook` buffer, which is not saved either because the checkpoint's config has it. Both buffers are
written anew by loading, since the meta device and `to_empty` lose them. On a GPU the first two change form,
see `kbit.nn.tiling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kbit.format import scales
from kbit.format.codebook import get_codebook
from kbit.format.names import ABSMAX, PACKED, PARTS, SCALE
from kbit.format.reference import blocks_of
from kbit.format.symmetry import is_symmetric
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import at
from kbit.nn import tied
from kbit.nn.casts import without_casts
from kbit.nn.fuse import Parts
from kbit.nn.initialized import Initialized
from kbit.nn.tiling import TILED, TileableModule
from kbit.ops import forms

_LOAD_FIRST = (
    "The state has weights that are not quantized, for layers that are: load it into the unquantized model, "
    "then call kbit.quantize_model."
)


class QuantizedModule(TileableModule, Initialized):
    """Base of KbitLinear, KbitEmbedding and KbitExperts.

    Attributes:
        bits: code width.
        layer_name: dotted name in the model, for error messages; "" if unknown.
        levels: the codebook's, where no device can lose them.
        shapes: {weight name: its shape}, such as {"weight": (N, K)}.
        is_tied, tied_to: whether it shares its weight; the layer whose weight `share` took, as no child.
    """

    tied_to: tuple[QuantizedModule, ...] = ()
    is_tied = False
    bits: int
    layer_name: str
    codebook: torch.Tensor
    levels: list[float]
    weight_packed: torch.Tensor
    weight_absmax: torch.Tensor
    weight_scale: torch.Tensor

    _canonical_parts, _factor = (PACKED, ABSMAX), SCALE
    _assignable = tuple(form.dtype for form in scales.ABSMAX_FORMATS.values())
    # The op that multiplies this module's weights, as `kbit.ops.forms` knows it; None: never on tiles.
    _op: str | None = None

    def _init_parts(
        self,
        shapes: dict[str, tuple[int, ...]],
        bits: int,
        codebook: str | Sequence[float] | torch.Tensor,
        absmax: str,
        device: Any,
        layer_name: str,
    ) -> None:
        """Register the codebook and empty parts; `fill` or a checkpoint provides their content."""
        if any(shape[-1] < 1 or min(shape) < 0 for shape in shapes.values()):
            raise ValueError(
                f"{type(self).__name__}: in-features must be at least 1 and no size negative, got weights of "
                f"{list(shapes.values())}{at(layer_name)}. Check the numbers of features."
            )
        levels = get_codebook(codebook, bits, layer_name)
        self.bits, self.layer_name, self.shapes = bits, layer_name, shapes
        for name, (*rows, columns) in shapes.items():
            blocks, stored = blocks_of(columns), scales.absmax_format(absmax, layer_name).dtype
            packed = torch.zeros(*rows, blocks * bits, dtype=torch.int32, device=device)
            self._set_parameter(name + PACKED, packed)
            self._set_parameter(name + ABSMAX, torch.zeros(*rows, blocks, dtype=stored, device=device))
            self.set_scale(name, None)
        self.levels = levels.tolist()
        self.register_buffer("codebook", levels.to(self._main_device()), persistent=False)

    @property
    def absmax_format(self) -> str:
        """Name of the format that the block scales have; those in tiles have E4M4's."""
        stored = {
            part.dtype for key, part in self._parameters.items() if part is not None and key.endswith(ABSMAX)
        }
        return scales.absmax_format(stored.pop() if stored else torch.uint8).name

    def set_scale(self, name: str, scale: torch.Tensor | None) -> None:
        """Set the per-matrix factors of a weight.

        Args:
            name: the weight's name.
            scale: float32, one per matrix; it becomes a parameter and is saved. None, or all 1 where that can
                be seen, makes it a buffer of ones that is not saved.
        """
        key = name + SCALE
        shape = self.shapes[name][:-2] if scale is None else tuple(scale.shape)
        if hasattr(self, key) and shape != tuple(getattr(self, key).shape):
            self.restore(name)  # tiles are those of one matrix per factor
        self._parameters.pop(key, None)
        self._drop_buffer(key)
        if scale is None or (scale.device.type != "meta" and bool((scale == 1).all())):
            shape = self.shapes[name][:-2]
            ones = torch.ones(shape, dtype=torch.float32, device=self._device_of(name))
            self.register_buffer(key, ones, persistent=False)
        else:
            self._set_parameter(key, scale)

    def _drop_buffer(self, key: str) -> None:
        self._buffers.pop(key, None)
        self._non_persistent_buffers_set.discard(key)  # a parameter of that name is saved

    def fill(self, name: str, parts: Parts) -> None:
        """Take over the parts of a quantized weight as the weight `name`, without a copy.

        On a GPU they change to tiles at once; the caller's are freed when it lets go of them.
        """
        self._parameters.pop(name + TILED, None)
        self._set_parameter(name + PACKED, parts.packed)
        self._set_parameter(name + ABSMAX, parts.absmax)
        self.set_scale(name, parts.scale)
        self._set_codebook(parts.codebook)
        self._change_to_tiles(name, force=False)

    def share(self, other: QuantizedModule, name: str = "weight") -> None:
        """Use the very parameters of `other`, of equal shape and width: tied weights, stored once.

        Both keep the canonical form, of which an embedding reads rows; see `kbit.nn.tied`.

        Raises:
            ValueError: `other` has another shape or width.
        """
        mine, theirs = (self.shapes[name], self.bits), (other.shapes[name], other.bits)
        if mine != theirs:
            raise ValueError(
                f"share: {self.layer_name or 'this layer'} is {mine[0]} at {mine[1]} bits, "
                f"{other.layer_name or 'the other'} {theirs[0]} at {theirs[1]}. Build both alike."
            )
        other.restore(name)
        self._parameters.pop(name + TILED, None)
        self.stays_canonical = other.stays_canonical = self.is_tied = other.is_tied = True
        tied.share(self, other, [name + part for part in PARTS])
        self.codebook, self.levels = other.codebook, other.levels

    def reset_constants(self, codebook: torch.Tensor) -> None:
        """Fill what no checkpoint holds: the codebook, and factors of 1.

        Needed after a module was built on the meta device.
        """
        for name in self.shapes:
            if name + SCALE in self._buffers:
                self.set_scale(name, None)
        self._set_codebook(codebook.to(self._main_device()))

    def reset_parameters(self) -> None:
        """Restore the codebook and factors of 1, in place; a quantized weight is loaded, not drawn.

        Deferred initialization calls this after `to_empty`, which leaves them without content.
        """
        device = self._main_device()
        if device.type == "meta":
            return
        constants = {"codebook": torch.tensor(self.levels, dtype=torch.float32, device="cpu")}
        for name, shape in self.shapes.items():
            if name + SCALE in self._buffers:
                constants[name + SCALE] = torch.ones(shape[:-2], dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for key, value in constants.items():
                held = getattr(self, key)
                if held.device == device:
                    held.copy_(value)  # a CUDA graph may have recorded its address
                else:
                    self._buffers[key] = value.to(device)

    def _set_codebook(self, codebook: torch.Tensor) -> None:
        if not codebook.is_meta:
            self.levels = codebook.tolist()
        self.codebook = codebook

    def _main_device(self) -> torch.device:
        return self._device_of(next(iter(self.shapes)))

    def freeze_parts(self) -> None:
        """Turn gradients off for all parts; a bias keeps its own setting."""
        for name in self.shapes:
            for part in PARTS:
                parameter = self._parameters.get(name + part)
                if parameter is not None:
                    parameter.requires_grad_(False)

    def quantized(self, name: str = "weight") -> QuantizedTensor:
        """A weight in the form it has, sharing this layer's memory.

        Returns:
            Of the weight's shape; fused experts whose gate and up differ in factors give [2E, I, H].
        """
        shape = self._matrices(name)
        scale = getattr(self, name + SCALE).detach().reshape(shape[:-2])
        tiled = self._held(name)
        if tiled is not None:
            return QuantizedTensor.from_tiles(tiled.detach(), self.codebook, scale, self.bits, shape)
        packed, absmax = self._as_matrices(name, *(part.detach() for part in self._canonical(name)))
        return QuantizedTensor(packed, absmax, self.codebook, scale, self.bits, shape)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
        """Move the parts with the module, but never cast them: model.half() must not touch a scale."""
        names = ["codebook"] + [name + part for name in self.shapes for part in (*PARTS, TILED)]
        held = [self._parameters.get(name, self._buffers.get(name)) for name in names]
        return super()._apply(without_casts(fn, held), recurse)

    def _before_loading(self, state_dict, prefix) -> None:
        """Accept state dicts with and without `_scale`: it is there only if some factor is not 1."""
        for name in self.shapes:
            key = name + SCALE
            stored = state_dict.get(prefix + key)
            if stored is None and key in self._parameters and prefix + name + PACKED in state_dict:
                self.set_scale(name, None)
            elif stored is not None and self._is_scale_shape(name, stored.shape):
                device = self._device_of(name)
                if key in self._buffers or getattr(self, key).shape != stored.shape:
                    self._drop_buffer(key)
                    self._set_parameter(key, torch.ones(stored.shape, dtype=torch.float32, device=device))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        _, strict, *_, errors = args
        if strict and _LOAD_FIRST not in errors and any(prefix + name in state_dict for name in self.shapes):
            errors.append(_LOAD_FIRST)
        tied.after_loading(self, state_dict, prefix)
        self.reset_parameters()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Also say in its metadata of which codebook the codes are; on disk a config does."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        getattr(destination, "_metadata", {}).get(prefix[:-1], {})["codebook"] = list(self.levels)

    def _refusals(self, metadata: dict[str, Any], prefix: str) -> Iterator[str]:
        stated = metadata.get("codebook", self.levels)
        if len(stated) == len(self.levels) and stated != self.levels:
            names = ", ".join(prefix + name for name in self.shapes)
            what = f"{stated} in the state dict, {self.levels} in this layer"
            yield f"codebook mismatch for {names}: {what}. Quantize with the one it was saved with."

    def _is_scale_shape(self, name: str, shape: torch.Size) -> bool:
        """Whether factors may have this shape: one per matrix, or gate's and up's per expert."""
        matrices = self.shapes[name][:-2]
        return tuple(shape) == matrices or (bool(matrices) and tuple(shape) == (*matrices, 2))

    def _describe(self) -> str:
        return f"bits={self.bits}"

    def _matrices(self, name: str) -> tuple[int, ...]:
        """Shape of a weight as the ops see it: one matrix per factor."""
        return self.shapes[name]

    def _as_matrices(
        self, name: str, packed: torch.Tensor, absmax: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Canonical parts as the ops take them: one matrix per factor, without a copy if contiguous."""
        rows = self._matrices(name)[:-1]
        return packed.reshape(*rows, packed.shape[-1]), absmax.reshape(*rows, absmax.shape[-1])

    def _tiles_pay(self, device: torch.device) -> bool:
        return self._op is not None and forms.tiles_pay(self._op, device, torch.uint8)

    def _may_tile(self, name: str, packed: torch.Tensor, absmax: torch.Tensor, force: bool) -> bool:
        if self.stays_canonical or self._op is None:
            return False
        if not force and not forms.should_tile(self, self._op, packed.device, absmax.dtype):
            return False
        *rows, columns = self.shapes[name]
        return absmax.dtype == torch.uint8 and tuple(absmax.shape) == (*rows, blocks_of(columns))

    def _to_tiles(self, name: str, packed: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
        is_symmetric(self.codebook)  # asked now, since products cannot while a CUDA graph is captured
        return torch.ops.kbit.tile(*self._as_matrices(name, packed, absmax), self.shapes[name][-1], self.bits)

    def _from_tiles(self, name: str, tiled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        packed, absmax = torch.ops.kbit.untile(tiled, self.bits, *self._matrices(name)[-2:])
        rows = self.shapes[name][:-1]
        return packed.view(*rows, packed.shape[-1]), absmax.view(*rows, absmax.shape[-1])
