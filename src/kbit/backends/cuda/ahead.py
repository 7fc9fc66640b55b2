"""Which kernels products and what is around them will use, to compile them before they are needed.

It asks the same functions that choose and plan launches. What it misses is compiled at its first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from kbit.backends.cuda import (
    attention_rests,
    caches,
    driver,
    grouped,
    grouped_preference,
    heads,
    masks,
    mma,
    norm,
    norm_logits,
    one_token,
    operands,
    position,
    resident,
    router_logits,
    routing,
    rows,
    sorted_rows,
    stream,
    tables,
    wgmma,
)
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.preference import decide
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.backends.dtype_codes import DTYPES

# Tokens of a step at which kernels change: with every few of them, then with tiles of 16 to 256 tokens, which
# are multiples of 8. They miss kernels of some hundredth of the other numbers, such as 1025 to 1056.
ROWS = (*range(1, 65), *range(72, 513, 8), *range(576, 2049, 64), *range(2560, 16385, 512))


# Modules of kernels that steps and rests of prompts of any model may run between its products.
BETWEEN = (norm, position, caches, heads, masks, attention_rests)


class Product(NamedTuple):
    """A weight that layers multiply by.

    Attributes:
        out_features, in_features, bits, gated: as in `WeightShape`, of one expert where there are experts.
        experts: how many; 0 for one weight.
        slots: how many of them a token has; 0 if that is not known.
        symmetric: as in `WeightShape`.
    """

    out_features: int
    in_features: int
    bits: int
    gated: bool = False
    experts: int = 0
    slots: int = 0
    symmetric: bool = True


def kernels(
    products: Iterable[Product],
    tokens: Sequence[int],
    dtype: torch.dtype,
    device: driver.DeviceLimits,
    known: tuple[tables.Table, ...] = (),
    canonical: Iterable[int] = (),
    others: Iterable[KernelSpec] = (),
) -> list[KernelSpec]:
    """The kernels of such products by so many tokens, and those that models run between them; each once.

    Args:
        products: weights in tiles.
        tokens: numbers of tokens, each 1 or more.
        dtype: of the activations.
        device: limits of the GPU.
        known: its tables of measurements.
        canonical: widths of weights in the canonical form, such as embeddings.
        others: further ones that the model may run, of any dtype.

    Raises:
        ValueError: KBIT_KERNEL is wrong; see `kbit.backends.cuda.preference.decide`.
    """
    found = {rows.dequantize_spec(bits, dtype): None for bits in canonical}
    kinds = dict.fromkeys(products)
    for product in kinds:
        weight = WeightShape(*product[:4], device, product.symmetric)
        for count in tokens:
            if product.experts:
                found |= dict.fromkeys(_of_experts(count, dtype, product, weight))
            else:
                found |= dict.fromkeys(_of_one(count, dtype, weight, known))
    between = [spec for module in BETWEEN for spec in module.specs()]
    if any(product.experts for product in kinds):
        between += [*routing.specs(), *router_logits.specs(), *norm_logits.specs()]
    return [*found, *(spec for spec in (*between, *others) if _is_of(spec, dtype))]


def _of_one(
    m: int, dtype: torch.dtype, weight: WeightShape, known: tuple[tables.Table, ...]
) -> Iterator[KernelSpec]:
    choice = decide(m, dtype, weight, known)
    if choice.kernel == "stream":
        yield from stream.kernels_of(m, dtype, weight)
    elif choice.kernel == "mma":
        yield from mma.kernels_of(mma.plan(m, weight), dtype, weight)
    elif choice.plan is not None:
        yield wgmma.kernel_of(choice.plan, dtype, weight)
    else:
        yield rows.dequantize_spec(weight.bits, dtype, tiled=True, symmetric=weight.symmetric)


def _of_experts(
    tokens: int, dtype: torch.dtype, product: Product, weight: WeightShape
) -> Iterator[KernelSpec]:
    slots, intermediate = product.slots, weight.out_features // 2 if weight.gated else weight.in_features
    alone = tokens == 1 and slots > 0
    if alone and one_token.is_chosen(dtype, dtype, intermediate, slots, weight.device.arch):
        yield one_token.kernel_of(slots, dtype, weight)  # but for experts that do not take it
    if weight.gated and operands.refusal(torch.float16, weight.out_features, weight.gated):
        weight = weight._replace(gated=False)
    m = tokens * max(1, slots)
    kernel = grouped_preference.choose(m, dtype, product.experts, weight)
    if kernel in ("grouped", "resident"):
        chosen = (grouped if kernel == "grouped" else resident).plan(m, product.experts, weight)
        assert chosen is not None
        yield sorted_rows.kernel_of(chosen.config, weight.bits, dtype, chosen.tokens, weight.symmetric)
    elif kernel == "wgmma":
        plan = wgmma.grouped_plan(m, product.experts, weight)
        yield wgmma.kernel_of(plan, dtype, weight, product.experts)
    elif kernel == "mma":
        yield from mma.kernels_of(mma.grouped_plan(m, product.experts, weight), dtype, weight, True)
    else:
        yield rows.dequantize_spec(weight.bits, dtype, tiled=True, symmetric=weight.symmetric)


def _is_of(spec: KernelSpec, dtype: torch.dtype) -> bool:
    """Whether a kernel takes a dtype, by the choices that it is compiled with; or any, or float32 logits."""
    config = dict(spec.config)
    if "bf16" in config:
        return dtype in operands.DTYPES and config["bf16"] == (dtype == torch.bfloat16)
    return config.get("dtype", DTYPES[dtype]) in (DTYPES[dtype], DTYPES[torch.float32])
