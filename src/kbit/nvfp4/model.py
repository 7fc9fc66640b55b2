"""A small mixture-of-experts language model whose every bit is defined, for the gate.

Weights come from integers, not from a random generator of floats; routing is decided by exact sums;
everything else is an NVFP4 operation or one elementwise IEEE operation. So under the contracts "exact" and
"seq16" a run has the same bytes on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kbit.nvfp4 import exact
from kbit.nvfp4.expert_products import expert_product
from kbit.nvfp4.folds import rmsnorm, rmsnorm_quantize_nvfp4, silu_mul, silu_mul_quantize_nvfp4
from kbit.nvfp4.formats import NVFP4Tensor
from kbit.nvfp4.gemm import gemm_nvfp4
from kbit.nvfp4.moe import ExpertInput, Routing, combine_sorted, gather_rows, quantize_for_experts, route
from kbit.nvfp4.quantize import global_scale_for, quantize_nvfp4, repack_nvfp4
from kbit.nvfp4.record import Recorder

# Of the layers, in turn: float32 shows every bit of a sum, bfloat16 is what models run in.
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model. K of the expert products is no multiple of 64, so padding is exercised.

    `WIDE` is for what `SMALL` does not reach: K of three strides of 2048, the last one not whole, fills all
    256 partial sums of a norm, and is 17 chains of 256 columns in products. Its weights' scales span
    `spread` powers of two: with one scale for all, float32 would hold any order's sums exactly.
    """

    vocabulary: int = 96
    hidden: int = 80
    experts: int = 8
    choices: int = 4
    width: int = 48
    layers: int = 2
    spread: int = 1


SMALL = Sizes()
WIDE = Sizes(hidden=4112, experts=4, choices=2, spread=9)


@dataclass(frozen=True)
class Levers:
    """What the gate toggles; none of it may change a bit.

    Attributes:
        dedup: how activations are quantized for experts; see `quantize_for_experts`.
        fold: norm and activation quantize in the same pass.
        tile: a forced tile or split choice of the products.
        tiled: weights in the layout "tiled", as layers hold them on a GPU.
        row_scale: each row of activations has a factor; not a lever, the same in both arms. Without fold
            and "scatter", which have none.
        accum: the accumulation contract; not a lever either.
    """

    dedup: str = "off"
    fold: bool = False
    tile: str | None = None
    tiled: bool = False
    row_scale: bool = False
    accum: str = "exact"


def seeded(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """float32 multiples of 2^-15, bell-shaped in -2..2, equal on every device and version of torch.

    The sum of four 16-bit fields of a mixed counter (splitmix64; Steele, Lea and Flood, 2014).
    """
    count = torch.Size(shape).numel()
    z = (torch.arange(1, count + 1) + (seed << 40)) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ _shift_right(z, shift)) * _signed(factor)
    z = z ^ _shift_right(z, 31)
    fields = torch.stack([(z >> shift) & 0xFFFF for shift in (0, 16, 32, 48)]).sum(0)
    return ((fields - 2 * 0xFFFF).float() * 2.0**-16).view(shape)


def dtype_of(layer: int) -> torch.dtype:
    """What a layer stores its activations in."""
    return DTYPES[layer % len(DTYPES)]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical, unlike torch's."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _parts(t: NVFP4Tensor) -> tuple[torch.Tensor, ...]:
    """Codes and scales, and the rows' factors if it has them."""
    return t.nv() if t.row_scale is None else (*t.nv(), t.row_scale)


class TinyMoE:
    """Greedy decoding of batches; each layer mixes over time by a decaying sum, then runs its experts."""

    def __init__(self, device: torch.device | str = "cpu", sizes: Sizes | None = None) -> None:
        self.sizes = size = sizes or SMALL
        self.device = torch.device(device)
        self.embedding = self._seeded((size.vocabulary, size.hidden), 1)
        self.norms = [
            (1 + self._seeded((size.hidden,), 10 + i) / 8).bfloat16() for i in range(size.layers + 1)
        ]
        # Multiples of 2^-10 with at most 12 bits, for exact routing.
        routers = [self._seeded((size.experts, size.hidden), 20 + i) for i in range(size.layers)]
        self.routers = [torch.round(router * 2**10).double() for router in routers]
        self.gate_up = [
            self._experts((size.experts, 2 * size.width, size.hidden), 30 + i) for i in range(size.layers)
        ]
        self.down = [
            self._experts((size.experts, size.hidden, size.width), 40 + i) for i in range(size.layers)
        ]
        self.head = self._matrix(self._seeded((size.vocabulary, size.hidden), 50))
        self._tiled: dict[int, NVFP4Tensor] = {}

    def _seeded(self, shape: tuple[int, ...], seed: int) -> torch.Tensor:
        return seeded(shape, seed).to(self.device)

    def _matrix(self, weight: torch.Tensor) -> NVFP4Tensor:
        spread = [2.0 ** -(column // 16 % self.sizes.spread) for column in range(weight.shape[1])]
        weight = weight * torch.tensor(spread, device=self.device)
        return quantize_nvfp4(weight, global_scale=global_scale_for(weight))

    def _experts(self, shape: tuple[int, ...], seed: int) -> NVFP4Tensor:
        weights = self._seeded(shape, seed) * 0.25
        return NVFP4Tensor.stack([self._matrix(weight) for weight in weights])

    def generate(self, batch: int, steps: int, levers: Levers, recorder: Recorder) -> torch.Tensor:
        """Decode `batch` sequences greedily.

        Args:
            batch: sequences; sequence b begins with token (7 b + 1) mod vocabulary.
            steps: tokens to decode for each.
            levers: see `Levers`.
            recorder: gets the weights' bytes and everything that is computed.

        Returns:
            int64 [batch, steps] on the CPU.
        """
        size = self.sizes
        for name, weight in (("gate_up", self.gate_up), ("down", self.down), ("head", [self.head])):
            for tensor in weight:
                recorder.add(f"weights.{name}", *tensor.nv(), tensor.global_scale)
        token = (torch.arange(batch, device=self.device) * 7 + 1) % size.vocabulary
        states = [torch.zeros(batch, size.hidden, device=self.device) for _ in range(size.layers)]
        tokens = []
        for _ in range(steps):
            token = self._step(token, states, levers, recorder)
            tokens.append(token.cpu())
        recorder.add("tokens", torch.stack(tokens, dim=1))
        return torch.stack(tokens, dim=1)

    def _step(
        self, token: torch.Tensor, states: list[torch.Tensor], levers: Levers, recorder: Recorder
    ) -> torch.Tensor:
        h = self.embedding[token]
        y = torch.zeros_like(h)
        for index in range(self.sizes.layers):
            mixed = (states[index] * 0.5 + h.float()).to(dtype_of(index))
            states[index] = mixed.float()
            y, h = self._layer(index, y.to(mixed.dtype), mixed, levers, recorder)
        a, _, _ = self._norm(self.sizes.layers, y, h, levers, recorder)
        head = self._held(self.head, levers)
        logits = gemm_nvfp4(a, head, levers.accum, torch.float32, levers.tile)
        recorder.add("head.gemm", logits)
        # argmax takes any of equal logits; the gate wants the first.
        positions = torch.arange(logits.shape[1], device=logits.device)
        best = logits == logits.amax(dim=1, keepdim=True)
        return torch.where(best, positions, logits.shape[1]).amin(dim=1)

    def _norm(
        self, index: int, y: torch.Tensor, h: torch.Tensor, levers: Levers, recorder: Recorder
    ) -> tuple[NVFP4Tensor, torch.Tensor, torch.Tensor]:
        """(quantized norm, norm, y + h) of token rows."""
        weight = self.norms[index]
        if levers.fold:
            folded = rmsnorm_quantize_nvfp4(y, weight, EPS, h)
            assert folded.norm is not None
            result = (folded.quantized, folded.norm, folded.residual)
        else:
            norm, h = rmsnorm(y, weight, EPS, h)
            result = (quantize_nvfp4(norm, row_scale=levers.row_scale), norm, h)
        recorder.add(f"norm{index}", result[1], result[2])
        recorder.add(f"norm{index}.quantized", *_parts(result[0]))
        return result

    def _layer(
        self, index: int, y: torch.Tensor, h: torch.Tensor, levers: Levers, recorder: Recorder
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, norm, h = self._norm(index, y, h, levers, recorder)
        ids, p = self._choose(index, norm)
        routing = route(ids, self.sizes.experts)
        a = self._expert_input(quantized, norm, routing, levers)
        rows = torch.arange(len(routing.source), device=self.device) if a.rows is None else a.rows
        recorder.add(f"layer{index}.routing", ids, p, routing.source, routing.bounds)
        recorder.add(f"layer{index}.gathered", *(part[rows.long()] for part in _parts(a.tensor)))
        common = (levers.accum, norm.dtype, levers.tile)
        gate_up = expert_product(a, routing, self._held(self.gate_up[index], levers), *common)
        recorder.add(f"layer{index}.gate_up.gemm", gate_up)
        activated = self._quantized_activation(gate_up, levers)
        recorder.add(f"layer{index}.activated.quantized", *_parts(activated.tensor))
        down = expert_product(activated, routing, self._held(self.down[index], levers), *common)
        result = combine_sorted(down, routing.inverse, p)
        recorder.add(f"layer{index}.down.gemm", down, result)
        return result, h

    def _held(self, weight: NVFP4Tensor, levers: Levers) -> NVFP4Tensor:
        """A weight in the layout that a product is to take it in."""
        if not levers.tiled:
            return weight
        if id(weight) not in self._tiled:
            self._tiled[id(weight)] = repack_nvfp4(weight, "tiled")
        return self._tiled[id(weight)]

    def _expert_input(
        self, quantized: NVFP4Tensor, norm: torch.Tensor, routing: Routing, levers: Levers
    ) -> ExpertInput:
        if not levers.fold:
            return quantize_for_experts(norm, routing, levers.dedup, row_scale=levers.row_scale)
        # The fold has quantized each token already; what is left is the copy, or none.
        if levers.dedup == "indirect":
            return ExpertInput(quantized, routing.source, len(norm), 0)
        return ExpertInput(gather_rows(quantized, routing.source), None, len(norm), len(routing.source))

    def _quantized_activation(self, gate_up: torch.Tensor, levers: Levers) -> ExpertInput:
        if levers.fold:
            return ExpertInput(silu_mul_quantize_nvfp4(gate_up), None, len(gate_up), 0)
        quantized = quantize_nvfp4(silu_mul(gate_up), row_scale=levers.row_scale)
        return ExpertInput(quantized, None, len(gate_up), 0)

    def _choose(self, index: int, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids int32 [T, U], p float32 [T, U]); reads the unquantized norm.

        Multiples of 2^-10 below 2^6 times 12-bit integers: 4112 products stay below 2^41, exact in float64
        whatever the order. A power of two keeps the logits of wide rows as large as those of 80 columns, so
        that no choice gets all of the weight.
        """
        spread = (self.sizes.hidden.bit_length() - 7) // 2
        fixed = torch.round(norm.float().clamp(-64, 64) * 2**10).double()
        logits = ((fixed @ self.routers[index].t()) * 2.0 ** -(20 + spread)).float()
        ordered, ids = torch.sort(logits, dim=1, descending=True, stable=True)
        chosen = ordered[:, : self.sizes.choices]
        weights = exact.exp(chosen - chosen[:, :1])
        total = weights[:, 0]
        for choice in range(1, self.sizes.choices):
            total = total + weights[:, choice]
        return ids[:, : self.sizes.choices].int().contiguous(), weights / total[:, None]
