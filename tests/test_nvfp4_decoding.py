"""Decoding on the CPU: every byte, few rows at a time, and no copy of a whole weight beside the result."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kbit.nvfp4 import dequantize_nvfp4, gemm_nvfp4, linear_nvfp4, quantize_nvfp4
from kbit.nvfp4.reference.quantize import _DECODED, decode
from made_up_nvfp4 import draw, random_tensor

F32 = torch.float32
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_every_byte_of_codes_with_every_byte_of_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).expand(256, 32, 8).reshape(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 32)
    decoded = decode(codes, scales)
    assert decoded.shape == (256, 512)
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        scale = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        scale = 0.0 if byte & 0x7F == 0x7F else scale
        for column, value in enumerate(decoded[byte].tolist()):
            code = column // 2 >> 4 if column % 2 else column // 2 & 15
            expected = math.copysign(magnitudes[code & 7] * scale, -1 if code & 8 else 1)
            assert (value, math.copysign(1, value)) == (expected, math.copysign(1, expected))


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_number_of_rows_at_a_time_changes_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w, a = random_tensor((33, 72), 1), quantize_nvfp4(torch.randn(5, 72, generator=draw(2)), row_scale=True)

    def results() -> list[torch.Tensor]:
        products = [gemm_nvfp4(a, w, accum, torch.float32) for accum in ("exact", "seq16", "tc")]
        rows_too = [dequantize_nvfp4(t, dtype) for t in (w, a) for dtype in DTYPES]
        return products + rows_too

    whole = results()
    monkeypatch.setitem(decode.__globals__, "_DECODED", 80 * rows)
    for one, other in zip(whole, results(), strict=True):
        assert torch.equal(one, other)


class Memory(TorchDispatchMode):
    """Notes the size of all memory that operations get, by address, however short the time."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            known = self.sizes.get(storage.data_ptr(), 0)
            self.sizes[storage.data_ptr()] = max(known, storage.nbytes())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_decoded_without_a_copy_in_float32(dtype: torch.dtype) -> None:
    w = random_tensor((1 << 12, 1 << 9), 1)
    assert math.prod(w.shape) == 8 * _DECODED
    with Memory() as memory:
        dequantize_nvfp4(w, dtype)
    whole = [size for size in memory.sizes.values() if size > 4 * _DECODED]
    assert whole == [math.prod(w.shape) * dtype.itemsize]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_16_bit_activations_are_multiplied_without_a_copy_of_the_weight(
    dtype: torch.dtype, bias: bool
) -> None:
    w = quantize_nvfp4(torch.randn(1 << 12, 500, generator=draw(1)))
    x = torch.randn(3, 2, 500, generator=draw(2)).to(dtype)
    added = torch.randn(1 << 12, generator=draw(3)).to(dtype) if bias else None
    with Memory() as memory:
        y = linear_nvfp4(x, w, added)
    assert max(memory.sizes.values()) <= 4 * _DECODED * max(4, dtype.itemsize)
    expected = F.linear(x, dequantize_nvfp4(w, dtype), added)
    assert y.shape == expected.shape
    assert torch.allclose(y, expected, rtol=4 * torch.finfo(dtype).eps, atol=500 * torch.finfo(F32).eps * 50)
    with_grad = linear_nvfp4(x.clone().requires_grad_(), w, added)
    assert torch.equal(with_grad, expected)
    assert with_grad.requires_grad


def test_16_bit_activations_and_no_rows() -> None:
    assert linear_nvfp4(torch.zeros(2, 3, 40), random_tensor((0, 40), 1)).shape == (2, 3, 0)


def test_exact_products_hold_no_weight_in_float64() -> None:
    w = random_tensor((1 << 12, 1 << 9), 1)
    a = quantize_nvfp4(torch.randn(2, 1 << 9))
    with Memory() as memory:
        gemm_nvfp4(a, w)
    assert max(memory.sizes.values()) == 8 * _DECODED
