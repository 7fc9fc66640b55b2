"""The two forms of an NVFP4 layer's weights: layout nv, which is saved, or the tiles that GPU kernels read.

As `kbit.nn.tiling` has it for k-bit weights: a weight `name` is held once, as the parameters `name_codes` and
`name_scales`, or as `name_tiled`. `state_dict()` holds the former in either case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kbit.nn.tiling import wait_for
from kbit.nvfp4.formats import layouts

_CODES, _SCALES, _TILED = "_codes", "_scales", "_tiled"
_lock = threading.Lock()  # one thread at a time changes a form


class TileableModule(nn.Module):
    """A module whose NVFP4 weights change form in place.

    Attributes:
        shapes: {weight: its shape}.
    """

    shapes: dict[str, tuple[int, ...]]

    @property
    def tileable(self) -> bool:
        """Whether this module multiplies tiles, where a GPU has kernels for them."""
        return False

    def prepare(self, force: bool = False) -> None:
        """Change weights on a GPU to tiles, if this module multiplies such.

        Moving to a GPU, loading and quantizing on one do this, and so does the first call that no CUDA graph
        records. It waits for the device; meanwhile a weight exists in both forms.

        Args:
            force: wherever the weights are.
        """
        for name in self.shapes:
            self._tile(name, force)

    def restore(self) -> None:
        """Change weights back to layout nv; addresses change, so not while a CUDA graph uses them."""
        for name in self.shapes:
            if name + _TILED in self._parameters:
                codes, scales = self._canonical(name)
                del self._parameters[name + _TILED]
                self._set(name + _CODES, codes)
                self._set(name + _SCALES, scales)

    def _tile(self, name: str, force: bool = False) -> None:
        if name + _TILED in self._parameters or not (force or self.tileable):
            return
        with _lock, torch.inference_mode(False), torch.no_grad():
            codes, scales = (self._parameters.get(name + part) for part in (_CODES, _SCALES))
            if codes is None or scales is None or codes.is_meta or not (force or self._should_tile(codes)):
                return
            tiled = layouts.from_nv(codes.detach(), scales.detach(), "tiled")
            wait_for(tiled)  # other streams read it next; and the other form can be freed
            self._set(name + _TILED, tiled)
            self._parameters.pop(name + _CODES)
            self._parameters.pop(name + _SCALES)

    def _should_tile(self, codes: torch.Tensor) -> bool:
        if not (self.tileable and codes.is_cuda and type(codes) is nn.Parameter):
            return False
        return not (torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing())

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        self._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def _canonical(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of a tiled weight, made anew."""
        *_, rows, columns = self.shapes[name]
        tiled = self._parameters[name + _TILED]
        assert tiled is not None
        return layouts.to_nv(tiled.detach(), "tiled", columns, rows)

    def __getattr__(self, name: str) -> Any:
        """The parts of a tiled weight in layout nv, made anew at each access."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            weight = self._tiled_weight(name)
            if weight is None:
                raise
            return self._canonical(weight)[name.endswith(_SCALES)]

    def _tiled_weight(self, part: str) -> str | None:
        """The weight that `part`, such as "weight_codes", belongs to, if that weight is tiled."""
        name, underscore, kind = part.rpartition("_")
        # While a module is unpickled it has no parameters yet.
        tiled = name + _TILED in self.__dict__.get("_parameters", {})
        return name if tiled and underscore + kind in (_CODES, _SCALES) else None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; setting a part of a tiled weight changes that back first."""
        if self._tiled_weight(name) is not None:
            self.restore()
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if any(name + _TILED in self._parameters and not self._on_gpu(name) for name in self.shapes):
            self.restore()
        self.prepare()
        return self

    def _on_gpu(self, name: str) -> bool:
        tiled = self._parameters[name + _TILED]
        return tiled is not None and tiled.is_cuda

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.shapes:
            if destination.pop(f"{prefix}{name}{_TILED}", None) is not None:
                codes, scales = self._canonical(name)
                destination[prefix + name + _CODES], destination[prefix + name + _SCALES] = codes, scales

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load layout nv. Tiles are written in place, so that a CUDA graph sees the new weights."""
        before = {name: self._parameters.get(name + _TILED) for name in self.shapes}
        self.restore()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for name, tiles in before.items():
            self._tile(name, force=tiles is not None)
            made = self._parameters.get(name + _TILED)
            if tiles is not None and made is not None and made.device == tiles.device:
                with torch.no_grad():
                    tiles.copy_(made)
                wait_for(tiles)
                self._parameters[name + _TILED] = tiles
