"""Random problems of what stands around products: attention, linear attention, norms, routing, formats.

Each op of `torch.ops.kbit` is compared with its definition in PyTorch (`kbit.backends.reference`): those that
say where they round to the bit, others within a few roundings of their dtype, computed in float32. What
quantizes to NVFP4 is compared with the CPU, to the bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz_checks import Results, Want, Ways, size_of

from kbit import nvfp4
from kbit.bench.gpu_timing import environment
from kbit.format.codebook import get_codebook
from kbit.nvfp4.moe import quantize_for_experts, route

ops = torch.ops.kbit
MOST = 2**23  # numbers of an operand
REFERENCE = {"KBIT_BACKEND": "reference"}
# Roundings: of one dtype's result where steps in between are rounded, too.
SOME, MANY = 4.0, 24.0
SHORT = 32  # numbers of a row


@dataclass
class Call:
    """An op and its arguments.

    Attributes:
        op: returns a tensor or some.
        args: of it.
        written: places of arguments that it writes; they are results, too.
        roundings: how many a result may be off, of the largest number in its row, or, of a short one, in
            the rows beside it; 0: none.
        view: what of the results is compared; None: all.
        on_cpu: whether the CPU says what is right, not the reference backend.
    """

    op: Callable[..., Results]
    args: list[Any]
    written: tuple[int, ...] = ()
    roundings: float = 0.0
    view: Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]] | None = None
    on_cpu: bool = False

    def run(self, to: torch.dtype | str | None = None) -> tuple[torch.Tensor, ...]:
        """All results; of arguments that are cast to a dtype or moved to a device first, or not."""
        given = [_moved(one, to) for one in self.args]
        for place in self.written:
            given[place] = given[place].clone()
        made = self.op(*given)
        results = (made,) if isinstance(made, torch.Tensor) else tuple(made or ())
        results += tuple(given[place] for place in self.written)
        return results if self.view is None else self.view(results)

    def wants(self) -> tuple[Want, ...]:
        """What the definition gives."""
        if self.on_cpu:
            return tuple(self._want(y.to(self.args[0].device)) for y in self.run("cpu"))
        with environment(REFERENCE):
            return tuple(self._want(y) for y in self.run(torch.float32 if self.roundings else None))

    def _want(self, y: torch.Tensor) -> Want:
        y = y.double()
        if not self.roundings or not y.numel():
            return Want(y, torch.zeros_like(y))
        dtypes = [one.dtype for one in self.args if isinstance(one, torch.Tensor) and one.is_floating_point()]
        eps = max(2.0**-17, *(torch.finfo(dtype).eps for dtype in dtypes))
        dims = (-1, -2) if y.dim() > 1 and y.shape[-1] < SHORT else -1  # few numbers may all be nearly 0
        largest = y.nan_to_num(0.0, 0.0, 0.0).abs().amax(dims, keepdim=True)
        return Want(y, (largest + y.abs().nan_to_num(0.0, 0.0, 0.0)) * (self.roundings * eps) + eps * eps)


def _moved(one: Any, to: torch.dtype | str | None) -> Any:
    if to is None or not isinstance(one, torch.Tensor):
        return one
    return one.to(to) if isinstance(to, str) or one.is_floating_point() else one


class Draw:
    """Random sizes and operands."""

    def __init__(self, seed: int, device: torch.device) -> None:
        """Those of a seed."""
        self.pick = random.Random(seed)
        self.made = torch.Generator(device).manual_seed(seed)
        self.device = device
        self.dtype = self.pick.choice((torch.float16, torch.bfloat16) * 3 + (torch.float32,))

    def size(self, most: int) -> int:
        """1 to `most`."""
        return size_of(self.pick, max(1, most))

    def of(self, *choices: Any) -> Any:
        """One of these."""
        return self.pick.choice(choices)

    def maybe(self, likely: float = 0.5) -> bool:
        """Whether."""
        return self.pick.random() < likely

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, contiguous."""
        numbers = torch.randn(shape, generator=self.made, device=self.device) * scale
        return numbers.to(dtype or self.dtype)

    def apart(self, *shape: int) -> torch.Tensor:
        """Normal numbers, whose last dimension may be part of a wider one."""
        before, behind = self.of((0, 0), (0, 0), (0, 8), (16, 0), (8, 64), (1, 2))
        whole = self.normal(*shape[:-1], before + shape[-1] + behind)
        return whole[..., before : before + shape[-1]]

    def uniform(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(shape, generator=self.made, device=self.device).to(dtype or self.dtype)

    def below(self, most: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Integers from 0, below `most`."""
        return torch.randint(most, shape, generator=self.made, device=self.device, dtype=dtype)

    def one(self, number: int) -> torch.Tensor:
        """A number on the device."""
        return torch.tensor(number, device=self.device).reshape(self.of((), (1,)))

    def angles(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines."""
        turns = self.uniform(*shape, dtype=torch.float32) * 6.28
        return turns.cos().to(self.dtype), turns.sin().to(self.dtype)

    def mask(self, *shape: int) -> torch.Tensor:
        """What is added to scores: 0, or -inf for what is not seen."""
        seen = self.uniform(*shape, dtype=torch.float32) < self.of(0.1, 0.5, 0.9)
        return torch.zeros(shape, device=self.device, dtype=self.dtype).masked_fill_(~seen, -torch.inf)

    def cache(self, length: int, *shape: int) -> torch.Tensor:
        """[.., L, D] of which so many rows are there; others are no numbers."""
        rows = self.normal(*shape)
        rows[..., length:, :] = torch.nan
        return rows


def _columns(d: Draw) -> int:
    return d.of(64, 128, 256, 128, 64, 96, 80, 192, 2 * d.size(130))


def _heads(d: Draw) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    shared = d.of(1, 2, 4, 8, d.size(16))
    return shared * d.of(1, 2, 3, 4, 5, 6, 7, 8, 16), shared


def _turned(d: Draw, columns: int) -> int:
    return min(columns // 2 * 2, d.of(columns // 2 * 2, columns // 2 * 2, 64, 32, 2 * d.size(64)))


def attention_step(d: Draw) -> Call:  # noqa: D103
    (heads, shared), columns = _heads(d), _columns(d)
    batch = d.of(1, 1, 1, 2, 3, 8, d.size(40))
    room = d.size(min(40000, MOST // (batch * shared * columns)))
    length = d.pick.randint(0, room + 1)
    sizes = (batch, heads, columns), (batch, shared, columns), (batch, shared, room, columns)
    norms = d.maybe()
    return Call(
        ops.attention_step,
        [
            d.apart(*sizes[0]),
            d.apart(*sizes[1]),
            d.apart(*sizes[1]),
            d.apart(*sizes[0]) if d.maybe() else None,
            d.normal(columns) if norms else None,
            d.normal(columns) if norms else None,
            *d.angles(d.of(1, batch), _turned(d, columns)),
            d.mask(d.of(1, batch), room) if d.maybe() else None,
            d.cache(length, *sizes[2]),
            d.cache(length, *sizes[2]),
            d.one(length),
            columns**-0.5,
            1e-6,
            d.maybe(),
            d.maybe(),
        ],
        written=(9, 10),
        roundings=MANY,
    )


def attention_rest(d: Draw) -> Call:  # noqa: D103
    (heads, shared), columns, batch = _heads(d), _columns(d), d.of(1, 1, 1, 2, 3)
    tokens = d.size(min(2048, MOST // (batch * heads * columns)))
    room = tokens + d.size(min(20000, MOST // (batch * heads * max(columns, tokens)))) - 1
    length = d.pick.randint(0, room - tokens)
    query = d.apart(batch, tokens, heads, columns).transpose(1, 2)
    caches = [d.cache(length + tokens, batch, shared, room, columns) for _ in range(2)]
    return Call(ops.attention_rest, [query, *caches, d.one(length), columns**-0.5], roundings=MANY)


def latent_attention_step(d: Draw) -> Call:  # noqa: D103
    columns, turned = d.of((512, 64), (512, 64), (256, 32), (d.size(512), 2 * d.size(64)))
    batch, heads = d.of(1, 1, 2, 5, d.size(16)), d.of(16, 20, 128, d.size(64))
    room = d.size(min(40000, MOST // (batch * max(heads, columns))))
    length = d.pick.randint(0, room + 1)
    return Call(
        ops.latent_attention_step,
        [
            d.apart(batch, heads, turned),
            d.normal(batch, heads, columns, scale=columns**-0.5),
            d.apart(batch, columns + turned),
            d.normal(columns),
            *d.angles(d.of(1, batch), turned),
            d.mask(d.of(1, batch), room) if d.maybe() else None,
            d.cache(length, batch, room, columns),
            d.cache(length, batch, room, turned),
            d.one(length),
            turned**-0.5,
            1e-6,
            d.maybe(),
            d.maybe(),
            d.maybe(),
        ],
        written=(7, 8),
        roundings=MANY,
    )


def latent_heads(d: Draw) -> Call:  # noqa: D103
    own, turned, values = d.of((128, 64, 128), (192, 64, 256), (d.size(200), 2 * d.size(64), d.size(200)))
    batch, heads = d.of(1, 1, 2, 3), d.of(16, 20, d.size(64))
    tokens = d.size(MOST // (batch * heads * (own + turned + values)))
    return Call(
        ops.latent_heads,
        [
            d.apart(batch, tokens, heads, own + turned),
            d.apart(batch, tokens, heads, own + values),
            d.apart(batch, tokens, turned),
            *d.angles(d.of(1, batch), tokens, turned),
            d.maybe(),
        ],
        written=(0,),
    )


def append_heads(d: Draw) -> Call:  # noqa: D103
    (heads, shared), columns, batch = _heads(d), _columns(d), d.of(1, 1, 2, 5)
    tokens = d.size(min(4096, MOST // (batch * heads * columns)))
    room = d.size(min(8192, MOST // (batch * shared * columns)))
    norms = d.maybe()
    return Call(
        ops.append_heads,
        [
            d.apart(batch, tokens, heads, columns),
            *(d.apart(batch, tokens, shared, columns) for _ in range(2)),
            *(d.normal(columns) if norms else None for _ in range(2)),
            *d.angles(d.of(1, batch), tokens, _turned(d, columns)),
            *(d.normal(batch, shared, room, columns) for _ in range(2)),
            d.one(d.pick.randint(0, room + 1)),
            1e-6,
            d.maybe(),
            d.maybe(),
        ],
        written=(7, 8),
        roundings=SOME,
    )


def cache_append(d: Draw) -> Call:  # noqa: D103
    batch, heads, (columns, of_values) = d.of(1, 1, 2, 5), d.size(16), d.of((128, 128), (64, 512), (5, 72))
    tokens, room = (d.size(min(4096, MOST // (batch * heads * 512))) for _ in range(2))
    return Call(
        ops.cache_append,
        [
            *(d.normal(batch, heads, room, size) for size in (columns, of_values)),
            *(d.apart(batch, tokens, heads, size).transpose(1, 2) for size in (columns, of_values)),
            d.one(d.pick.randint(0, room + 1)),
        ],
        written=(0, 1),
    )


def causal_mask(d: Draw) -> Call:  # noqa: D103
    batch, tokens = d.size(5), d.size(2000)
    keys = d.size(min(20000, MOST // (batch * tokens)))
    there = None if d.maybe() else d.uniform(batch, d.size(keys + 10), dtype=torch.float32) < 0.8
    return Call(ops.causal_mask, [d.one(d.pick.randint(0, keys)), there, batch, tokens, keys, d.dtype])


def rotary(d: Draw) -> Call:  # noqa: D103
    (heads, shared), columns, batch = _heads(d), _columns(d), d.of(1, 1, 2, 5)
    tokens = d.size(min(4096, MOST // (batch * heads * columns)))
    both = [d.apart(batch, tokens, count, columns).transpose(1, 2) for count in (heads, shared)]
    return Call(ops.rotary, [*both, *d.angles(d.of(1, batch), tokens, _turned(d, columns)), d.maybe()])


def rotary_angles(d: Draw) -> Call:  # noqa: D103
    frequencies = 10000 ** -d.uniform(d.of(32, 64, d.size(128)), dtype=torch.float32)
    positions = d.below(d.of(100, 100_000), d.size(4), d.size(4096))
    return Call(ops.rotary_angles, [frequencies, positions, d.of(1.0, 1.3), d.dtype], roundings=SOME)


def rms_norm(d: Draw) -> Call:  # noqa: D103
    columns = d.of(128, 256, 2048, 4096, d.size(9000))
    inner = d.of((), (d.size(32),))
    x = d.apart(d.size(MOST // (columns * math.prod(inner))), *inner, columns)
    added = [d.apart(*x.shape)] if d.maybe() else []
    op = ops.add_rms_norm if added else ops.rms_norm
    return Call(op, [x, *added, d.normal(columns), 1e-6, d.maybe(), d.maybe()], roundings=SOME)


def moe_logits(d: Draw) -> Call:  # noqa: D103
    experts, columns = d.of(8, 64, 128, 512, d.size(600)), d.of(2048, 4096, d.size(5000))
    dtype, last = d.of(None, torch.float32), d.normal(1, columns) if d.maybe() else None
    x = d.apart(d.of(d.size(4), d.size(600)), columns)
    weight = d.normal(experts, columns, scale=columns**-0.5)
    if dtype is not None and d.maybe():
        weight, last = weight.float(), None if last is None else last.float()
    return Call(ops.moe_logits, [x, weight, dtype, last], roundings=SOME)


def moe_route(d: Draw) -> Call:
    """Compared are scores of what was chosen, in order, and weights: sums of softmax end in other bits."""
    shared, scoring = d.of("", "", "one", "sigmoid"), d.of("softmax", "sigmoid")
    experts = d.of(8, 64, 128, 512, 1 + d.size(1100))
    logits = d.normal(d.size(3000), experts + (shared == "sigmoid"))
    bias = d.normal(experts, dtype=torch.float32, scale=0.1) if scoring == "sigmoid" and d.maybe() else None
    scores = logits[:, :experts].float()
    scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
    scores = torch.nn.functional.pad(scores if bias is None else scores + bias, (0, 1))

    def chosen(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ids, weights = results
        different = (ids.sort(-1).values.diff(dim=-1) > 0).all(-1)
        return scores.gather(1, ids), weights, different

    top_k = min(experts, d.of(1, 2, 8, 10, d.size(32)))
    args = [logits, top_k, scoring, d.maybe(), bias, d.of(1.0, 2.5), shared]
    return Call(ops.moe_route, args, roundings=SOME, view=chosen)


def moe_align(d: Draw) -> Call:  # noqa: D103
    experts, choices = d.of(8, 128, 512, d.size(3000)), d.of(1, 2, 8, 10, d.size(32))
    ids = d.below(experts + 2, d.size(400_000 // choices), choices, dtype=d.of(torch.int32, torch.int64)) - 1
    return Call(ops.moe_align, [ids, experts])


def moe_combine(d: Draw) -> Call:  # noqa: D103
    choices, columns = d.of(1, 2, 8, 10, d.size(32)), d.of(2048, 5, d.size(9000))
    tokens = d.size(min(4096, MOST // (choices * columns)))
    rows = tokens * choices
    inverse = torch.randperm(rows, generator=d.made, device=d.device).view(tokens, choices).int()
    bounds = d.below(rows + 1, 1 + d.size(9), dtype=torch.int32).sort().values if d.maybe() else None
    weights = d.uniform(tokens, choices, dtype=d.of(torch.float32, d.dtype))
    return Call(ops.moe_combine, [d.normal(rows, columns), inverse - d.of(0, 0, 1), weights, bounds])


def _delta(d: Draw) -> tuple[int, int, int, int, bool]:
    """Heads of keys, of values, columns, taps, by heads."""
    keys = d.of(16, 4, d.size(16))
    return keys, keys * d.of(1, 2, 2, 3, 4), d.of(128, 128, 128, 64, d.size(128)), d.of(4, 4, 2, 3), d.maybe()


def gated_delta_step(d: Draw) -> Call:  # noqa: D103
    keys, values, columns, taps, by_heads = _delta(d)
    batch, channels = d.of(1, 1, 2, 3, 8), (2 * keys + values) * columns
    other = d.of(None, torch.float32)
    return Call(
        ops.gated_delta_step,
        [
            d.apart(batch, channels + values * columns),
            d.apart(batch, 2 * values),
            d.normal(batch, channels, taps),
            d.normal(batch, values, columns, columns, dtype=torch.float32, scale=0.3),
            d.normal(channels, taps),
            d.normal(values, dtype=other),
            d.normal(values, dtype=other),
            d.normal(columns),
            1e-6,
            by_heads,
        ],
        written=(2, 3),
        roundings=MANY,
    )


def gated_delta_inputs(d: Draw) -> Call:  # noqa: D103
    keys, values, columns, taps, by_heads = _delta(d)
    batch, channels = d.of(1, 1, 2, 3), (2 * keys + values) * columns
    tokens = d.size(min(3000, MOST // (batch * (channels + values * columns))))
    other = d.of(None, torch.float32)
    return Call(
        ops.gated_delta_inputs,
        [
            d.apart(batch, tokens, channels + values * columns),
            d.apart(batch, tokens, 2 * values),
            d.normal(batch, channels, taps) if d.maybe() else None,
            d.normal(channels, taps),
            d.normal(values, dtype=other),
            d.normal(values, dtype=other),
            d.below(tokens + 1, batch) if d.maybe(0.3) else None,
            by_heads,
        ],
        roundings=SOME,
    )


def gated_delta_rule(d: Draw) -> Call:  # noqa: D103
    keys, values, columns, _, _ = _delta(d)
    batch = d.of(1, 1, 2, 3)
    tokens = d.size(min(3000, MOST // (batch * values * columns)))
    unit = [torch.nn.functional.normalize(d.normal(batch, tokens, keys, columns), dim=-1) for _ in range(2)]
    before = d.normal(batch, values, columns, columns, dtype=torch.float32, scale=0.3) if d.maybe() else None
    beta, decay = d.uniform(batch, tokens, values), -d.uniform(batch, tokens, values, dtype=torch.float32)
    decay *= d.of(0.01, 1.0, 20.0)
    value = d.normal(batch, tokens, values, columns)
    return Call(ops.gated_delta_rule, [*unit, value, beta, decay, before], roundings=MANY)


def gated_delta_output(d: Draw) -> Call:  # noqa: D103
    keys, values, columns, _, by_heads = _delta(d)
    batch, width = d.of(1, 2), (2 * keys + 2 * values) * columns
    tokens = d.size(min(3000, MOST // (batch * width)))
    x = d.normal(batch, tokens, values, columns)
    args = [x, d.apart(batch, tokens, width), d.normal(columns), 1e-6, by_heads]
    return Call(ops.gated_delta_output, args, roundings=SOME)


def _weight(d: Draw) -> tuple[int, tuple[int, ...], int, int]:
    """Bits, experts if any, rows, columns."""
    bits, columns, experts = d.of(2, 3, 4, 5), d.size(9000), d.of((), (), (d.size(8),))
    return bits, experts, d.size(MOST // (4 * columns * math.prod(experts))), columns


def quantize(d: Draw) -> Call:  # noqa: D103
    bits, experts, rows, columns = _weight(d)
    w = d.normal(*experts, rows, columns, dtype=d.of(d.dtype, torch.float32))
    w *= 2.0 ** d.pick.uniform(-12, 6)
    codebook = get_codebook("nf", bits) if d.maybe() else d.normal(2**bits, dtype=torch.float32).sort().values
    codebook = (codebook / codebook.abs().max()).to(d.device)
    return Call(ops.quantize, [w, codebook, bits, "e4m4", d.maybe()])


def formats(d: Draw) -> Call:
    """Codes to tiles, back, to weights, and rows of them."""
    bits, experts, rows, columns = _weight(d)
    blocks = -(-columns // 32)
    packed = d.below(2**31, *experts, rows, blocks * bits, dtype=torch.int32)
    absmax = d.below(256, *experts, rows, blocks, dtype=torch.uint8)
    codebook = d.normal(2**bits, dtype=torch.float32).sort().values
    codebook /= codebook.abs().max()
    scale = d.uniform(*experts, dtype=torch.float32) + 0.1
    scale = scale if d.maybe() else torch.ones_like(scale)
    ids = d.below(rows, d.size(300))

    def all_of(packed: torch.Tensor, absmax: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tiled = ops.tile(packed, absmax, columns, bits)
        weights = ops.dequantize_tiled(tiled, codebook, scale, rows, columns, d.dtype)
        plain = ops.dequantize(packed, absmax, codebook, scale, columns, d.dtype)
        back = ops.untile(tiled, bits, rows, columns)
        more = () if experts else (ops.embedding(ids, packed, absmax, codebook, scale, columns, d.dtype),)
        return tiled, weights, plain, *back, *more

    return Call(all_of, [packed, absmax])


def nvfp4_formats(d: Draw) -> Call:
    """Rows to codes in every layout, by their own factors or one, and dealt to experts."""
    columns, choices, experts = d.of(2048, 512, d.size(9000)), d.of(1, 2, 8, 10), d.of(8, 512, d.size(600))
    x = d.apart(d.size(min(4096, MOST // (columns * choices))), columns) * 2.0 ** d.pick.uniform(-8, 6)
    search, ties, factor = d.maybe(), d.of("zero", "even"), d.of(None, 0.37)
    layout, dedup, row_scale = d.of("nv", "ggml", "mmq", "tiled"), d.of("off", "gather", "scatter"), d.maybe()
    ids = d.below(experts, len(x), choices)

    def made(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        t = nvfp4.quantize_nvfp4(x, search, ties, row_scale, factor, layout)
        own = row_scale and dedup != "scatter"
        rows = quantize_for_experts(x, route(ids, experts), dedup, search, ties, factor, own).tensor
        return *_parts(t), nvfp4.dequantize_nvfp4(t, d.dtype), *_parts(rows)

    return Call(made, [x, ids], on_cpu=True)


def nvfp4_folds(d: Draw) -> Call:
    """A norm, and silu(gate) * up, quantized in the same pass."""
    columns = d.of(2048, 512, 4096, 16 * d.size(300), d.size(5000))
    rows = d.size(min(4096, MOST // columns))
    how = {"search": d.maybe(), "ties": d.of("zero", "even"), "global_scale": d.of(None, 0.37)}

    def made(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, residual, gate_up = others
        normed = nvfp4.rmsnorm_quantize_nvfp4(x, weight, 1e-6, residual, **how)
        assert normed.norm is not None
        products = nvfp4.silu_mul_quantize_nvfp4(gate_up, **how)
        return *_parts(normed.quantized), normed.norm, normed.residual, *_parts(products)

    args = [d.apart(rows, columns), d.normal(columns), d.apart(rows, columns), d.apart(rows, 2 * columns)]
    return Call(made, args, on_cpu=True)


def _parts(t: nvfp4.NVFP4Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(part for part in (t.codes, t.scales) if part is not None)


CALLS: tuple[Callable[[Draw], Call], ...] = (
    attention_step,
    attention_rest,
    latent_attention_step,
    latent_heads,
    append_heads,
    cache_append,
    causal_mask,
    rotary,
    rotary_angles,
    rms_norm,
    moe_logits,
    moe_route,
    moe_align,
    moe_combine,
    gated_delta_step,
    gated_delta_inputs,
    gated_delta_rule,
    gated_delta_output,
    quantize,
    formats,
    nvfp4_formats,
    nvfp4_folds,
)


def problem(seed: int, device: torch.device) -> tuple[str, Ways]:
    """The problem of a seed in words, and the one way to run it: what is dispatched to."""
    d = Draw(seed, device)
    made = d.pick.choice(CALLS)
    call = made(d)
    parts = (
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
        if isinstance(one, torch.Tensor)
        else str(one)
        for one in call.args
    )

    def ways() -> Ways:
        yield made.__name__, call.run, call.wants()

    return f"seed={seed} {made.__name__}({', '.join(parts)})", ways()
