"""The two forms of a quantized layer's weights: canonical parameters, or the tiles that GPU kernels read.

A weight called `weight` is held once: as the parameters `weight_packed` and `weight_absmax`, or as
`weight_tiled`. Tiles are a parameter without gradient too, and not a buffer, because DistributedDataParallel
sends every buffer at every step. They are never saved: `state_dict()` holds the canonical form.
"""

from __future__ import annotations

import threading

import torch
from torch import nn

from kbit.format.reference import blocks_of
from kbit.ops import forms

_PACKED, _ABSMAX, _TILED = "_packed", "_absmax", "_tiled"

# One thread at a time changes a form. Held once per weight, for as long as its tiles are made.
_lock = threading.Lock()


def wait_for(tiles: torch.Tensor) -> None:
    """Wait until tiles are written: other streams, and kernels that start early, may read them next."""
    if tiles.is_cuda:
        torch.cuda.current_stream(tiles.device).synchronize()


class TileableModule(nn.Module):
    """A module whose weights change form in place. It computes the same in either.

    Attributes:
        bits: code width.
        shapes: {weight name: its shape}, such as {"weight": (N, K)}.
        stays_canonical: whether the parameters may not change form: another module holds the very same, so
            that there is one copy for both, or a CUDA graph has recorded their addresses.
    """

    bits: int
    shapes: dict[str, tuple[int, ...]]
    stays_canonical = False

    # The op that multiplies this module's weights, as `kbit.ops.forms` knows it; None: never on tiles.
    _op: str | None = None

    def prepare(self, force: bool = False) -> None:
        """Change to tiles whatever weight a kernel of this device multiplies in that form.

        Moving to a GPU, loading and quantizing on one do this, and so does the first call that neither
        torch.compile nor a CUDA graph records. It waits for the device; meanwhile a weight exists in both
        forms. Modules with `stays_canonical` stay as they are, and so do block scales other than E4M4.

        Args:
            force: also where no kernel does, as on the CPU; the reference then multiplies, slowly.
        """
        for name in self.shapes:
            self._tile(name, force)

    def restore(self, name: str | None = None) -> None:
        """Change weights back to the canonical form; all of them, or one.

        What takes parameters by name, such as accelerate's cpu_offload or FSDP, needs this form. Addresses
        change, so do not while a CUDA graph that captured this module is in use.
        """
        for weight in self.shapes if name is None else (name,):
            if weight + _TILED in self._parameters:
                packed, absmax = self._canonical(weight)
                del self._parameters[weight + _TILED]
                self._set_parameter(weight + _PACKED, packed)
                self._set_parameter(weight + _ABSMAX, absmax)

    def _tiles(self, name: str) -> torch.Tensor | None:
        """A weight's tiles for this call, made if it is time to; None if it is canonical."""
        tiled = self._held(name)
        if tiled is not None or torch.compiler.is_compiling():
            return tiled
        if not self._offloaded():
            self._tile(name, force=False)
        return self._held(name)

    def _offloaded(self) -> bool:
        """Whether a hook of accelerate moves the parameters in and out at each call, by their names."""
        hook = self.__dict__.get("_hf_hook")
        return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))

    def _held(self, name: str) -> torch.Tensor | None:
        """A weight's tiles, or None if it is canonical."""
        tiled = self._parameters.get(name + _TILED)
        # In a replica that DataParallel made for one call, parameters are plain attributes.
        return self.__dict__.get(name + _TILED) if tiled is None else tiled

    def _tile(self, name: str, force: bool) -> None:
        if not self._can_tile(name, force):
            return
        # Not as inference tensors, even if a generation makes them: training may follow.
        with _lock, torch.inference_mode(False), torch.no_grad():
            packed, absmax = (self._parameters.get(name + part) for part in (_PACKED, _ABSMAX))
            if packed is None or absmax is None:
                return  # another thread was faster
            *rows, columns = self._matrices(name)
            flat = (part.detach().view(*rows, -1) for part in (packed, absmax))
            tiled = torch.ops.kbit.tile(*flat, columns, self.bits)
            wait_for(tiled)  # and the canonical form can be freed
            self._set_tiles(name, tiled)

    def _can_tile(self, name: str, force: bool) -> bool:
        packed, absmax = (self._parameters.get(name + part) for part in (_PACKED, _ABSMAX))
        if packed is None or absmax is None or self.stays_canonical or self._op is None:
            return False
        if not force and not forms.should_tile(self, self._op, packed.device, absmax.dtype):
            return False
        # Shards and tensors of tracers stay what they are.
        plain = type(packed) is type(absmax) is nn.Parameter and not packed.is_meta
        *rows, columns = self.shapes[name]
        expected = (*rows, blocks_of(columns))
        return plain and absmax.dtype == torch.uint8 and tuple(absmax.shape) == expected

    def _set_tiles(self, name: str, tiled: torch.Tensor) -> None:
        # First add, then remove: another thread finds one form or the other.
        self._set_parameter(name + _TILED, tiled)
        self._parameters.pop(name + _PACKED, None)
        self._parameters.pop(name + _ABSMAX, None)

    def _set_parameter(self, name: str, value: torch.Tensor) -> None:
        shared = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        self._parameters[name] = shared

    def _matrices(self, name: str) -> tuple[int, ...]:
        """Shape of a weight as the ops see it: one matrix per factor."""
        return self.shapes[name]

    def _canonical(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(packed, absmax) of a weight; made anew from tiles."""
        tiled = self._held(name)
        if tiled is None:
            return getattr(self, name + _PACKED), getattr(self, name + _ABSMAX)
        packed, absmax = torch.ops.kbit.untile(tiled.detach(), self.bits, *self._matrices(name)[-2:])
        rows = self.shapes[name][:-1]
        return packed.view(*rows, -1), absmax.view(*rows, -1)

    def _device_of(self, name: str) -> torch.device:
        held = self._held(name)
        return (getattr(self, name + _PACKED) if held is None else held).device

    def _tiled_name(self, key: str) -> str | None:
        """The weight that `key`, such as "weight_packed", is a part of, if that weight is tiled."""
        name, underscore, part = key.rpartition("_")
        if underscore + part not in (_PACKED, _ABSMAX):
            return None
        # While a module is unpickled it has no parameters yet.
        return name if "_parameters" in self.__dict__ and self._held(name) is not None else None

    def __getattr__(self, name: str):
        """The canonical parts of a tiled weight, made anew at each access."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            weight = self._tiled_name(name)
            if weight is None:
                raise
            return self._canonical(weight)[name.endswith(_ABSMAX)]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; setting a canonical part of a tiled weight changes that back first."""
        weight = self._tiled_name(name)
        if weight is not None:
            self.restore(weight)
        super().register_parameter(name, param)
