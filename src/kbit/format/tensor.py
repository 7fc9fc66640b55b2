"""QuantizedTensor: a quantized weight as one object, in canonical or in tiled form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kbit.format import reference
from kbit.format.autocast import without_autocast
from kbit.format.codebook import check_bits, validate_codebook
from kbit.format.part_checks import check_all, check_parts, check_tiles, sizes_of
from kbit.format.scales import absmax_format
from kbit.format.symmetry import is_symmetric


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight matrix, or a stack of them.

    It holds its codes and block scales once, in one of two forms: the canonical bit-planes, or the tiles that
    GPU kernels read, which `tile()` and the first `kbit.linear` on a GPU make. The value does not depend on
    the form, and no attribute does: on a tiled weight `packed` and `absmax` are made anew at each access.

    Attributes:
        packed: int32 [..., N, blocks * bits], bit-planes.
        absmax: [..., N, blocks], uint8 (E4M4), float16 or float32.
        codebook: float32 [2^bits], strictly ascending, its largest magnitude 1. That is checked on a CPU; a
            GPU would have to be waited for, so there it is taken as it is.
        scale: float32 [...], a power of two per matrix, 1 unless the block scales need it.
        bits: code width, 2 to 5.
        shape: shape of the weight, (N, K) or (E, N, K).
        tiled: the tiled form, int32 [..., row tiles, column tiles, words]; None for the canonical form.

    Raises:
        TypeError, ValueError: the parts do not belong together.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    scale: torch.Tensor
    bits: int
    shape: tuple[int, ...]
    tiled: torch.Tensor | None = field(default=None, init=False)

    # Set once a CUDA graph has recorded addresses of the canonical form; then products leave it alone.
    stays_canonical = False

    def __post_init__(self) -> None:
        check_bits(self.bits)
        object.__setattr__(self, "shape", sizes_of(self.shape))
        check_parts(self.packed, self.absmax, self.codebook, self.scale, self.shape[-1], bits=self.bits)
        if tuple(self.absmax.shape[:-1]) != self.shape[:-1]:
            raise ValueError(
                f"quantized tensor: shape {self.shape} does not match absmax "
                f"{tuple(self.absmax.shape)}; every dimension but the last must be equal."
            )
        _check_levels(self.codebook, self.bits)

    @classmethod
    def from_tiles(
        cls,
        tiled: torch.Tensor,
        codebook: torch.Tensor,
        scale: torch.Tensor,
        bits: int,
        shape: tuple[int, ...],
    ) -> QuantizedTensor:
        """A weight in tiled form, without a copy.

        A product launched right behind the kernel that writes one of these may read it before: let a stream's
        work be done before.

        Args:
            tiled: int32 [..., row tiles, column tiles, words].
            codebook, scale, bits, shape: as in the class.

        Raises:
            TypeError, ValueError: the parts do not belong together.
        """
        check_bits(bits)
        shape = sizes_of(shape)
        check_tiles(tiled, codebook, scale, shape[-2], shape[-1], bits)
        if tuple(tiled.shape[:-3]) != shape[:-2]:
            raise ValueError(
                f"quantized tensor: shape {shape} does not match tiles {tuple(tiled.shape)}; both or "
                f"neither must be a stack of matrices, of one length."
            )
        _check_levels(codebook, bits)
        q = object.__new__(cls)
        # Not packed and absmax, which __getattr__ then provides.
        q.__dict__.update(codebook=codebook, scale=scale, bits=bits, shape=shape, tiled=tiled)
        return q

    def __getattr__(self, name: str) -> torch.Tensor:
        """`packed` and `absmax` of a weight in tiled form; they are plain attributes in canonical form."""
        if name not in ("packed", "absmax") or self.__dict__.get("tiled") is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.canonical()[name == "absmax"]

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(packed, absmax): both at the price of one, if the weight is in tiled form."""
        if self.tiled is None:
            return self.packed, self.absmax
        # By the name of the op: who converts on which device is known above this layer.
        return torch.ops.kbit.untile(self.tiled, self.bits, *self.shape[-2:])

    def tile(self) -> QuantizedTensor:
        """Change to the tiled form, in place, and give the canonical one up.

        Waits once for the current stream: then the tiles are complete for every stream, and what they were
        made of is freed, which no other stream may still be reading. Meanwhile both forms exist.

        Returns:
            This object.

        Raises:
            TypeError: the block scales are not E4M4.
        """
        if self.tiled is None:
            with torch.inference_mode(False), torch.no_grad():  # for gradients in x may be asked for later
                tiled = torch.ops.kbit.tile(self.packed, self.absmax, self.shape[-1], self.bits)
            if tiled.is_cuda:
                torch.cuda.current_stream(tiled.device).synchronize()
                is_symmetric(self.codebook)  # asked now, since products cannot while a CUDA graph is captured
            # The order lets another thread read this object meanwhile.
            self.__dict__["tiled"] = tiled
            self.__dict__.pop("packed", None)
            self.__dict__.pop("absmax", None)
        return self

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.codebook.device

    @property
    def absmax_format(self) -> str:
        """Name of the block scale format."""
        return "e4m4" if self.tiled is not None else absmax_format(self.absmax.dtype).name

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes and block scales; tiles are larger by their padding."""
        blocks = math.prod(self.shape[:-1]) * reference.blocks_of(self.shape[-1])
        return blocks * (4 * self.bits + absmax_format(self.absmax_format).bytes)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, padding included: bits + 8 / 32 with E4M4 scales and K a multiple of 32."""
        return 8.0 * self.nbytes / max(1, math.prod(self.shape))

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """A copy on `device`, or itself. Tiles stay on one kind of device. Raises TypeError for a dtype."""
        if isinstance(device, torch.dtype):
            raise TypeError(f"to: codes have no dtype, got {device}. Use kbit.dequantize(q, dtype).")
        if (codebook := self.codebook.to(device)) is self.codebook:
            return self
        scale = self.scale.to(device)
        if self.tiled is not None and codebook.device.type == self.device.type:
            return self.from_tiles(self.tiled.to(device), codebook, scale, self.bits, self.shape)
        packed, absmax = (part.to(device) for part in self.canonical())
        return replace(self, packed=packed, absmax=absmax, codebook=codebook, scale=scale)

    def cpu(self) -> QuantizedTensor:
        """`to("cpu")`."""
        return self.to("cpu")

    def cuda(self) -> QuantizedTensor:
        """`to("cuda")`: torch's current GPU."""
        return self.to("cuda")

    @classmethod
    def stack(cls, matrices: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """One [E, N, K] weight from E quantized matrices.

        Args:
            matrices: at least one, [N, K] each, of one shape, width, scale format, codebook and device.

        Raises:
            TypeError: one of them is no `QuantizedTensor`.
            ValueError: there is none, or they differ.
        """
        check_all("stack", matrices, cls)
        kinds = {(tuple(q.shape), q.bits, q.absmax_format, q.device) for q in matrices}
        if len(kinds) != 1:
            raise ValueError(
                f"stack: matrices must be of one shape, width, scale format and device, got "
                f"{sorted(map(str, kinds)) or 'none'}. Quantize them alike."
            )
        first = matrices[0]
        codebooks = torch.stack([q.codebook for q in matrices])
        if not codebooks.is_meta and not bool((codebooks == first.codebook).all()):
            raise ValueError("stack: matrices must have one codebook. Quantize them with the same one.")
        with without_autocast(first.device):  # which would refuse to join float16 scales
            packed, absmax = (
                torch.stack(parts) for parts in zip(*(q.canonical() for q in matrices), strict=True)
            )
        scale = torch.stack([q.scale for q in matrices])
        return cls(packed, absmax, first.codebook, scale, first.bits, (len(matrices), *first.shape))

    def __repr__(self) -> str:
        form = "" if self.tiled is None else ", tiled"
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, bits={self.bits}, absmax={self.absmax_format}, "
            f"bits_per_weight={self.bits_per_weight:.2f}, device={self.device}{form})"
        )


def _check_levels(codebook: torch.Tensor, bits: int) -> None:
    """Check a codebook's levels where they can be read without a wait: not on a GPU, nor while tracing."""
    held = type(codebook) in (torch.Tensor, torch.nn.Parameter)  # else it may have no data, as fake ones
    if held and codebook.device.type == "cpu" and not torch.compiler.is_compiling():
        validate_codebook(codebook, bits)
