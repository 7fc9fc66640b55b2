"""The two forms of a quantized layer's weights: canonical parameters, or the tiles that GPU kernels read.

A weight called `weight` is held once: as two canonical parts, such as the parameters `weight_packed` and
`weight_absmax`, or as `weight_tiled`. Tiles are a parameter without gradient too, and not a buffer, because
DistributedDataParallel sends every buffer at every step. They are never saved: `state_dict()` holds the
canonical form.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from kbit.format.adjacent import adjoin, as_one
from kbit.format.words import at

# Suffix of the parameter that holds a weight's tiles.
TILED = "_tiled"

# One thread at a time changes a form. Held once per weight, for as long as its tiles are made.
lock = threading.Lock()


def wait_for(device: torch.device) -> None:
    """Wait until weights are written: the host, other streams, early kernels may read them next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_neighbours(tiles: Sequence[torch.Tensor]) -> bool:
    """Have tiles of several layers, or biases, be neighbours in memory, in this order; see `adjoin`.

    Returns:
        Whether they were not.
    """
    # No parameters: replicas of DataParallel. Of inference mode: their data cannot be replaced.
    if any(type(one) is not nn.Parameter or one.is_inference() for one in tiles) or as_one(tiles) is not None:
        return False
    with lock, torch.inference_mode(False), torch.no_grad():
        together = adjoin(tiles)
        wait_for(together[0].device)
        for one, moved in zip(tiles, together, strict=True):
            one.data = moved
    return True


class TileableModule(nn.Module):
    """A module whose weights change form in place. It computes the same in either.

    Each format of weights has a subclass, which names the canonical parts and has `_tiles_pay`, `_may_tile`,
    `_to_tiles` and `_from_tiles`.

    Attributes:
        shapes: {weight name: its shape}, such as {"weight": (N, K)}.
        stays_canonical: whether the parameters may not change form: another module holds the very same, so
            that there is one copy for both, or a CUDA graph has recorded their addresses.
    """

    shapes: dict[str, tuple[int, ...]]

    # Suffixes of a weight's canonical parts: its codes, then its block scales; and of its factor.
    _canonical_parts: ClassVar[tuple[str, str]]
    _factor: ClassVar[str]
    # Dtypes of block scales that take the place of those there are, whatever dtype these have.
    _assignable: ClassVar[tuple[torch.dtype, ...]] = ()
    stays_canonical = False

    def _tiles_pay(self, device: torch.device) -> bool:
        """Whether a kernel of this device multiplies this module's weights as tiles."""
        raise NotImplementedError

    def _may_tile(self, name: str, codes: torch.Tensor, scales: torch.Tensor, force: bool) -> bool:
        """Whether a weight is to change to tiles now; see `prepare` for `force`."""
        raise NotImplementedError

    def _to_tiles(self, name: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The tiles of a weight."""
        raise NotImplementedError

    def _from_tiles(self, name: str, tiled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The canonical parts of a weight; undoes `_to_tiles`."""
        raise NotImplementedError

    def prepare(self, force: bool = False) -> None:
        """Change to tiles whatever weight a kernel of this device multiplies in that form.

        Moving to a GPU, loading and quantizing on one do this, and so does the first call that neither
        torch.compile nor a CUDA graph records. It waits for the device; meanwhile a weight exists in both
        forms. Tied weights stay as they are, and so do block scales that no kernel's tiles have.

        Args:
            force: also where no kernel does, as on the CPU; the reference then multiplies, slowly.
        """
        for name in self.shapes:
            self._change_to_tiles(name, force)

    def restore(self, name: str | None = None) -> None:
        """Change weights back to the canonical form; all of them, or one.

        What takes parameters by name, such as accelerate's cpu_offload or FSDP, needs this form. Addresses
        change, so do not while a CUDA graph that captured this module is in use.
        """
        for weight in self.shapes if name is None else (name,):
            if weight + TILED in self._parameters:
                self._change_to_canonical(weight)

    def _tiles_for_call(self, name: str) -> torch.Tensor | None:
        """A weight's tiles for this call, made if it is time to; None if it is canonical."""
        tiled = self._held(name)
        if tiled is not None or torch.compiler.is_compiling():
            return tiled
        codes = self._parameters.get(name + self._canonical_parts[0])
        if codes is None or not self._tiles_pay(codes.device):  # as in every call on a CPU
            return None
        if not self._offloaded():
            self._change_to_tiles(name, force=False)
        return self._held(name)

    def _offloaded(self) -> bool:
        """Whether a hook of accelerate moves the parameters in and out at each call, by their names."""
        hook = self.__dict__.get("_hf_hook")
        return any(getattr(one, "offload", False) for one in getattr(hook, "hooks", (hook,)))

    def _held(self, name: str) -> torch.Tensor | None:
        """A weight's tiles, or None if it is canonical."""
        tiled = self._parameters.get(name + TILED)
        # In a replica that DataParallel made for one call, parameters are plain attributes.
        return self.__dict__.get(name + TILED) if tiled is None else tiled

    def _change_to_tiles(self, name: str, force: bool) -> None:
        parts = self._plain_parts(name)
        if parts is None or not self._may_tile(name, *parts, force):
            return
        # Not as inference tensors, even if a generation makes them: training may follow.
        with lock, torch.inference_mode(False), torch.no_grad():
            parts = self._plain_parts(name)
            if parts is None:
                return  # another thread was faster
            tiled = self._to_tiles(name, *(part.detach() for part in parts))
            wait_for(tiled.device)  # and the canonical form can be freed
            # First add, then remove: another thread finds one form or the other.
            self._set_parameter(name + TILED, tiled)
            for part in self._canonical_parts:
                self._parameters.pop(name + part, None)

    def _change_to_canonical(self, name: str) -> None:
        with lock, torch.inference_mode(False), torch.no_grad():
            canonical = self._canonical(name)
            wait_for(canonical[0].device)
            for part, tensor in zip(self._canonical_parts, canonical, strict=True):
                self._set_parameter(name + part, tensor)
            self._parameters.pop(name + TILED, None)

    def _plain_parts(self, name: str) -> tuple[nn.Parameter, nn.Parameter] | None:
        """A weight's canonical parts; None if it is tiled, or they are shards, a tracer's or without data."""
        codes, scales = (self._parameters.get(name + part) for part in self._canonical_parts)
        if codes is None or scales is None or codes.is_meta or scales.is_meta:
            return None
        return (codes, scales) if type(codes) is type(scales) is nn.Parameter else None

    def _set_parameter(self, name: str, value: torch.Tensor) -> None:
        shared = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        self._parameters[name] = shared

    def _canonical(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The canonical parts of a weight; made anew from tiles."""
        tiled = self._held(name)
        if tiled is not None:
            return self._from_tiles(name, tiled.detach())
        codes, scales = self._canonical_parts
        return getattr(self, name + codes), getattr(self, name + scales)

    def _device_of(self, name: str) -> torch.device:
        held = self._held(name)
        return (getattr(self, name + self._canonical_parts[0]) if held is None else held).device

    def _tiled_name(self, key: str) -> str | None:
        """The weight that `key`, such as "weight_packed", is a part of, if that weight is tiled."""
        name, underscore, part = key.rpartition("_")
        if underscore + part not in self._canonical_parts:
            return None
        # While a module is unpickled it has no parameters yet.
        return name if "_parameters" in self.__dict__ and self._held(name) is not None else None

    def __getattr__(self, name: str) -> Any:
        """The canonical parts of a tiled weight, made anew at each access."""
        own = self.__dict__
        for kind in ("_buffers", "_parameters"):  # at once: a call of nn.Module's own method takes longer
            if name in own.get(kind, ()):
                return own[kind][name]
        try:
            return super().__getattr__(name)
        except AttributeError:
            weight = self._tiled_name(name)
            if weight is None:
                raise
            return self._canonical(weight)[name.endswith(self._canonical_parts[1])]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; setting a canonical part of a tiled weight changes that back first."""
        if name == "weight" and param is not None and param is getattr(self, name, None):
            return  # peft sets what it read when it takes an adapter off
        weight = self._tiled_name(name)
        if weight is not None:
            self.restore(weight)
        super().register_parameter(name, param)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a tensor for a canonical part of a tiled weight: nothing would read that attribute."""
        if type(value) is torch.Tensor and self._tiled_name(name) is not None:
            raise TypeError(
                f"{type(self).__name__}: {name} cannot be replaced by a tensor, its weight is held as tiles"
                f"{at(getattr(self, 'layer_name', ''))}. Call restore() of the layer first, as for "
                f"torch.func.functional_call with a state dict; or load_state_dict."
            )
        super().__setattr__(name, value)

    def launched_values(self) -> Hashable:
        """What launches take from this module by value, which a CUDA graph keeps whatever is loaded."""
        return None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        before = {name: self._device_of(name) for name in self.shapes}
        super()._apply(fn, recurse)
        for name, device in before.items():
            now = self._device_of(name)
            if now != device and not self._tiles_pay(now):
                wait_for(device)  # with non_blocking, what was copied from there need not be here yet
                self.restore(name)
        self.prepare()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Save the canonical form; from tiles it is made anew, and takes memory until the caller drops it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.shapes:
            if destination.pop(f"{prefix}{name}{TILED}", None) is not None:
                canonical = self._canonical(name)
                wait_for(canonical[0].device)  # whoever saves may copy in another stream
                for part, tensor in zip(self._canonical_parts, canonical, strict=True):
                    destination[f"{prefix}{name}{part}"] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load the canonical form; nothing of another format.

        Tiles are written in place, so a CUDA graph that captured this module sees the new weights.
        """
        tiled = {name: self._held(name) for name in self.shapes}
        self.restore()
        metadata, *_, errors = args
        assigned = metadata.get("assign_to_params_buffers", False)
        wrong = list(self._refusals(metadata, prefix))
        wrong += self._other_dtypes(state_dict, prefix, self._assignable if assigned else ())
        if wrong:
            errors.extend(wrong)
        else:
            self._before_loading(state_dict, prefix)
            super()._load_from_state_dict(state_dict, prefix, *args)
        for name, tiles in tiled.items():
            self._load_tiles(name, tiles)

    def _refusals(self, metadata: dict[str, Any], prefix: str) -> Iterator[str]:
        """What a state dict's metadata says against loading it."""
        yield from ()

    def _other_dtypes(self, state_dict: Any, prefix: str, scales: tuple[torch.dtype, ...]) -> Iterator[str]:
        """What is wrong with stored parts: copying would convert numbers that are bits of another format.

        Args:
            state_dict, prefix: of what is loaded.
            scales: dtypes that block scales may have, beside that of this layer's.
        """
        for name in self.shapes:
            for part, others in zip((*self._canonical_parts, self._factor), ((), scales, ()), strict=True):
                key, stored = name + part, state_dict.get(prefix + name + part)
                held = self._parameters.get(key, self._buffers.get(key))
                found, known = getattr(stored, "dtype", None), held is not None and (held.dtype, *others)
                if found and known and found not in known:
                    yield (
                        f"dtype mismatch for {prefix}{key}: {found} in the checkpoint, {known[0]} in this "
                        f"layer. Build it with the format of the checkpoint, and cast no part of it."
                    )

    def _before_loading(self, state_dict: Any, prefix: str) -> None:
        """Make room for what a state dict holds; all weights are canonical."""

    def _load_tiles(self, name: str, tiles: torch.Tensor | None) -> None:
        """Change a loaded weight to tiles: into those it had before, where they fit."""
        same_place = tiles is not None and tiles.device == self._device_of(name)
        self._change_to_tiles(name, force=same_place)
        made = self._held(name)
        if same_place and tiles is not None and made is not None and made.shape == tiles.shape:
            with torch.no_grad():
                tiles.copy_(made)
            wait_for(tiles.device)
            self._set_parameter(name + TILED, tiles)
