"""Run every CUDA kernel on small shapes, tails included, under compute-sanitizer, and write a summary.

    python tools/sanitize.py benchmarks/results/sanitizer.json

Needs a GPU and compute-sanitizer; exits with 1 if a tool found something. racecheck follows barriers thread
by thread, so for it the kernels are compiled with every lane arriving (KBIT_ALL_LANES_ARRIVE in
csrc/common.cuh) instead of one for its warp.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

TOOLS = ("memcheck", "racecheck", "initcheck")
SHAPES = ((96, 320), (17, 33), (130, 576))
# Columns that pairs and fours of blocks of stream.cu split; too many for the tools in other kernels.
LONG = ((32, 2336), (32, 5216))


def run_cases(bits: int, symmetric: bool = True) -> None:
    """The kernels of one width; the results are compared where two ways lead to them."""
    import torch

    from kbit.backends import cuda
    from kbit.format.codebook import get_codebook, midpoints
    from kbit.quantizers.scale_search import WINDOWS

    dtype = torch.float16 if bits % 2 == 0 else torch.bfloat16
    levels = get_codebook("nf", bits)
    levels[3] *= 1.0 if symmetric else 0.999
    codebook, middles = levels.cuda(), midpoints(levels).cuda()
    for n, k in SHAPES:
        w = torch.randn(n, k, device="cuda").to(dtype)
        cuda.quantize(w, codebook, middles, bits, WINDOWS[bits])
        several = torch.stack([w.float() * factor for factor in (1.0, 1e-6, 1.0)])  # one needs a factor
        cuda.quantize(several, codebook, middles, bits, None)
        packed, absmax, scale = cuda.quantize(w, codebook, middles, bits, None)
        tiled = cuda.to_tiled(packed, absmax, bits, k)
        again = cuda.from_tiled(tiled, bits, n, k)
        assert torch.equal(again[0], packed)
        assert torch.equal(again[1], absmax)
        decoded, from_tiles = torch.empty_like(w), torch.empty_like(w)
        cuda.dequantize(packed, absmax, codebook, scale, k, decoded)
        cuda.dequantize_tiled(tiled, codebook, scale, bits, 0, from_tiles)
        assert torch.equal(decoded, from_tiles)
        ids, rows = torch.tensor([0, n - 1, 3], device="cuda"), w.new_empty(3, k)
        cuda.embedding(ids, packed, absmax, codebook, scale, k, rows)
        assert torch.equal(rows, decoded[ids])
        for gated in (False, True) if n % 32 == 0 else (False,):
            _multiply_few((tiled, codebook, scale, None, n, k, gated), dtype, (1, 2, 3, 5, 16))
            _multiply_by_mma((tiled, codebook, scale, None, n, k, gated), dtype)
            _multiply_many((tiled, codebook, scale, None, n, k, gated), dtype)
            _multiply_experts(tiled.expand(5, -1, -1, -1).contiguous(), codebook, (n, k, gated), dtype)
    for n, k in LONG:
        w = torch.randn(n, k, device="cuda").to(dtype)
        packed, absmax, scale = cuda.quantize(w, codebook, middles, bits, None)
        tiled = cuda.to_tiled(packed, absmax, bits, k)
        for gated in (False, True):
            _multiply_few((tiled, codebook, scale, None, n, k, gated), dtype, (1, 4, 5), (None, 2))
    torch.cuda.synchronize()


def _attend_to_parts() -> None:
    """What is around FlashAttention, without it: PyTorch's kernels are not looked at."""
    import torch

    from kbit.backends.cuda import attention_rests

    def made_up(query, *_):
        return query.contiguous(), torch.zeros(query.shape[1], len(query), device="cuda")

    with mock.patch.object(attention_rests, "_flash", made_up):
        for dtype in (torch.float16, torch.bfloat16):
            for batch, heads, tokens, columns in ((1, 6, 5, 64), (2, 3, 17, 24), (1, 16, 300, 256)):
                query = torch.randn(batch, tokens, heads, columns, device="cuda").to(dtype).transpose(1, 2)
                keys = torch.zeros(batch, 1, tokens + 9, columns, device="cuda", dtype=dtype)
                for length in (0, 3, 9, 20):
                    at = torch.tensor(length, device="cuda")
                    y = torch.ops.kbit.attention_rest(query, keys, keys, at, 0.1)
                    torch.testing.assert_close(y, query.transpose(1, 2), rtol=0.01, atol=0.01)


def run_around_products() -> None:
    """Experts chosen from logits, ids whose sorting takes several launches, what steps have around them."""
    import torch

    from kbit.ops import direct

    sizes = ((24, torch.float32), (128, torch.float16), (300, torch.bfloat16), (1000, torch.bfloat16))
    for experts, dtype in sizes:
        logits, bias = torch.randn(5, experts, device="cuda").to(dtype), torch.randn(experts, device="cuda")
        for how in (("softmax", True), ("sigmoid", True, bias, 1.5)):
            ids, weights = torch.ops.kbit.moe_route(logits, 10, *how)
            assert int(ids.max()) < experts
            assert torch.isfinite(weights).all()
        for shared, routed in (("sigmoid", experts - 1), ("one", experts)):
            ids, weights = torch.ops.kbit.moe_route(logits, 10, "softmax", True, None, 1.0, shared)
            assert bool((ids[:, -1] == routed).all())
            assert torch.isfinite(weights).all()
    # Blocks of a token and an expert, and of more; of four tokens; tensor cores.
    for tokens, experts, wide in (
        (2, 9, False),
        (3, 19, True),
        (2, 39, False),
        (31, 60, True),
        (13, 170, False),
    ):
        x, weight = (torch.randn(rows, 2056, device="cuda").half() for rows in (tokens, experts))
        router, dtype = (weight.float(), torch.float32) if wide else (weight, None)
        for last in (None, router[:1].clone()):
            logits = torch.ops.kbit.moe_logits(x, router, dtype, last)
            assert torch.isfinite(logits).all()
            if tokens <= 3:
                made = direct.add_rms_norm_logits(x, x, weight[0], 1e-6, False, True, router, last, dtype)
                assert made is not None
                assert torch.equal(made[2], torch.ops.kbit.moe_logits(made[1], router, dtype, last))
    ids = torch.randint(0, 300, (2500, 2), device="cuda", dtype=torch.int32)
    source, bounds, _ = torch.ops.kbit.moe_align(ids, 300)
    assert torch.equal(source.long().sort().values, torch.arange(5000, device="cuda") // 2)
    assert int(bounds[-1]) == 5000
    for rows, columns in ((5, 8), (9, 256), (3, 576), (2, 5120), (2, 8200)):
        x, weight = (torch.randn(shape, device="cuda").half() for shape in ((rows, columns), (columns,)))
        for how in ((False, True), (True, False)):
            assert torch.isfinite(torch.ops.kbit.rms_norm(x, weight, 1e-6, *how)).all()
            total, y = torch.ops.kbit.add_rms_norm(x, x.flip(0), weight, 1e-6, *how)
            assert torch.equal(total, x + x.flip(0))
            assert torch.isfinite(y).all()
    heads = torch.randn(1100, 32, 256, device="cuda").half()[..., 128:]
    assert torch.isfinite(torch.ops.kbit.rms_norm(heads, heads[0, 0].contiguous(), 1e-6)).all()
    for columns, turned, tokens in ((64, 64, 1), (128, 128, 7), (256, 64, 3)):
        query, key = (torch.randn(2, heads, tokens, columns, device="cuda").half() for heads in (6, 2))
        cos, sin = torch.randn(2, 1, tokens, turned, device="cuda").half()
        for interleaved in (False, True):
            turned_both = torch.ops.kbit.rotary(query, key, cos, sin, interleaved)
            assert all(torch.isfinite(x).all() for x in turned_both)
        value = key[..., : columns // 2]
        keys, values = (torch.zeros(2, 2, 9, x.shape[-1], device="cuda").half() for x in (key, value))
        for length in (0, 8, 20):  # there is room for all, for one token, for none
            torch.ops.kbit.cache_append(keys, values, key, value, torch.tensor(length, device="cuda"))
        angles = torch.randn(2, 1, tokens, turned, device="cuda").half()
        new = (x.transpose(1, 2) for x in (query, key, key))
        norms = torch.randn(2, columns, device="cuda").half()
        keys, values = (torch.zeros(2, 2, 9, columns, device="cuda").half() for _ in range(2))
        given = (*new, *norms, *angles, keys, values, torch.tensor(8, device="cuda"))
        assert torch.isfinite(torch.ops.kbit.append_heads(*given, 1e-6)).all()
    for tokens, keys, known in ((1, 64, 64), (3, 130, 7), (2, 7, 0)):
        there = torch.ones(2, known, device="cuda").bool()
        for given in (None, there):
            mask = torch.ops.kbit.causal_mask(
                torch.tensor(5, device="cuda"), given, 2, tokens, keys, torch.half
            )
            assert int((mask == 0).sum()) == 2 * sum(
                min(6 + token, keys, keys if given is None else known) for token in range(tokens)
            )
        positions = torch.randint(2**18, (2, tokens), device="cuda")
        both = torch.ops.kbit.rotary_angles(torch.rand(keys, device="cuda"), positions, 1.0, torch.half)
        assert all(torch.isfinite(angles).all() for angles in both)
    _attend_to_parts()
    for heads, columns, room in (((6, 2), 64, 150), ((12, 1), 128, 300), ((4, 2), 256, 70)):
        for length in (room - 2, room):  # there is room for one more, and not
            new = torch.randn(3, 2, heads[0], columns, device="cuda").half()
            weights = torch.randn(2, columns, device="cuda").half()
            angles, mask = (
                torch.randn(2, 1, 32, device="cuda").half(),
                torch.zeros(1, room, device="cuda").half(),
            )
            keys, values = torch.randn(2, 2, heads[1], room, columns, device="cuda").half()
            query, key, value = new[0], new[1, :, : heads[1]], new[2, :, : heads[1]]
            given = (query, key, value, new[1], *weights, *angles, mask, keys, values)
            at = torch.tensor(length, device="cuda")
            assert torch.isfinite(torch.ops.kbit.attention_step(*given, at, 0.1, 1e-6)).all()
    for heads, length in ((20, 31), (20, 40), (5, 69), (40, 70)):  # there is room for one more, and not
        latents, keys = (torch.randn(2, 70, columns, device="cuda").half() for columns in (512, 64))
        new = torch.randn(2, heads, 576, device="cuda").half().split([512, 64], 2)
        more = (torch.randn(shape, device="cuda").half() for shape in ((2, 576), 512, (1, 64), (1, 64)))
        mask, at = torch.zeros(1, 70, device="cuda").half(), torch.tensor(length, device="cuda")
        given = (new[1], new[0], *more, mask, latents, keys, at, 0.1, 1e-6, False, True, True)
        assert torch.isfinite(torch.ops.kbit.latent_attention_step(*given)).all()
    for heads, own, values in ((20, 192, 256), (3, 32, 40)):
        shapes = (2, 7, heads, own + 64), (2, 7, heads, own + values), (2, 7, 64), (1, 7, 64), (1, 7, 64)
        for interleaved in (False, True):
            given = [torch.randn(shape, device="cuda").half() for shape in shapes]
            assert all(torch.isfinite(one).all() for one in torch.ops.kbit.latent_heads(*given, interleaved))
    for k_heads, ratio, by_heads in ((3, 1, True), (2, 2, True), (2, 1, False), (2, 3, False), (1, 4, False)):
        v_heads, channels = k_heads * ratio, (2 + ratio) * k_heads * 128
        shapes = (3, channels + v_heads * 128), (3, 2 * v_heads), (3, channels, 4), (channels, 4)
        projected, gates, window, taps = (torch.randn(shape, device="cuda").half() for shape in shapes)
        of_heads = [torch.rand(v_heads, device="cuda") for _ in range(2)]
        state, norm = torch.zeros(3, v_heads, 128, 128, device="cuda"), torch.ones(128, device="cuda").half()
        y = torch.ops.kbit.gated_delta_step(
            projected, gates, window, state, taps, *of_heads, norm, 1e-6, by_heads
        )
        assert torch.isfinite(y).all()
        for tokens in (1, 3, 17, 40):
            prompt = (x[:, None].expand(-1, tokens, -1).contiguous() for x in (projected, gates))
            given, weights = tuple(prompt), (taps, *of_heads)
            few = torch.tensor([2, 0, tokens], device="cuda")
            for before, there in ((None, None), (window, None), (None, few), (window, few)):
                made = torch.ops.kbit.gated_delta_inputs(*given, before, *weights, there, by_heads)
                assert all(torch.isfinite(x).all() for x in made)
            y = torch.ops.kbit.gated_delta_output(made[2], given[0], norm, 1e-6, by_heads)
            assert torch.isfinite(y).all()
        for tokens, before in ((1, None), (64, state), (330, None)):  # six chunks, of which three are held
            shapes = [(3, tokens, heads, 128) for heads in (k_heads, k_heads, v_heads)]
            rows = [torch.randn(shape, device="cuda").half() / 11 for shape in shapes]
            beta, decay = (torch.rand(3, tokens, v_heads, device="cuda") for _ in range(2))
            made = torch.ops.kbit.gated_delta_rule(*rows, beta.half(), -decay, before)
            assert all(torch.isfinite(x).all() for x in made)


def run_ranks() -> None:
    """Sums over GPUs, and rows of all, as one of them whose memory has the parts of all others already."""
    import torch

    from kbit.backends.cuda import ranks

    capacity = 300
    kinds = product((2, 3, 8), (torch.float16, torch.bfloat16), (False, True), (1, 2))
    for count, dtype, gathers, number in kinds:
        parts = torch.randn(count, 5, 40, device="cuda").to(dtype)
        sent = parts.view(torch.int32).view(count, -1, 2)
        inboxes = torch.zeros(count, 2, count, capacity, 4, device="cuda", dtype=torch.int32)
        inbox = inboxes[count - 1, number % 2, : count - 1, : sent.shape[1]]
        inbox[..., ::2], inbox[..., 1::2] = sent[:-1], number
        state = torch.tensor([number, 0, 0], device="cuda", dtype=torch.int32)
        given = ranks.Inboxes([one.data_ptr() for one in inboxes], state, count - 1, capacity, 600)
        out = torch.full((5, 40 * count if gathers else 40), torch.nan, device="cuda", dtype=dtype)
        ranks.one_shot(parts[-1], given, out, gathers)
        total = torch.zeros(5, 40, device="cuda")
        for part in parts:
            total += part
        assert torch.equal(out, torch.cat(list(parts), -1) if gathers else total.to(dtype))
        assert state.tolist() == [number + 1, 0, 0]
        assert torch.equal(inboxes[0, number % 2, -1, : sent.shape[1], ::2], sent[-1])


def run_nvfp4() -> None:
    """Every NVFP4 kernel: quantizers, layouts, folds, products of one weight and of experts."""
    import torch

    from kbit import nvfp4

    x = torch.randn(9, 144, device="cuda", dtype=torch.float16)
    weights = torch.randn(4, 40, 144, device="cuda", dtype=torch.float16)
    one, experts = nvfp4.quantize_nvfp4(weights[0]), nvfp4.quantize_nvfp4(weights)
    for layout in ("ggml", "mmq"):
        nvfp4.repack_nvfp4(nvfp4.repack_nvfp4(one, layout), "nv")
    nvfp4.dequantize_nvfp4(one, torch.float16)
    nvfp4.rmsnorm(x, x[0], 1e-6)
    nvfp4.rmsnorm_quantize_nvfp4(x, x[0], 1e-6, residual=x)
    nvfp4.silu_mul(x)
    nvfp4.silu_mul_quantize_nvfp4(x[:, :128].contiguous())
    ids = torch.randint(0, 4, (9, 2), device="cuda", dtype=torch.int32)
    for accum in ("exact", "seq16", "tc"):
        nvfp4.gemm_nvfp4(nvfp4.quantize_nvfp4(x), one, accum)
        for dedup in ("off", "gather", "scatter", "indirect"):
            nvfp4.moe_gemm_nvfp4(x, experts, ids, dedup=dedup, accum=accum)
    # Columns of several steps, more than there are stages, dealt to teams and blocks.
    long, weight = (nvfp4.quantize_nvfp4(torch.randn(m, 2640, device="cuda")) for m in (9, 24))
    for accum in ("exact", "seq16", "tc"):
        for tile in nvfp4.tiles_nvfp4(accum, "cuda"):
            if tile != "cublas":  # in whose own kernels the tools find races and reads of old memory
                nvfp4.gemm_nvfp4(long, weight, accum, tile=tile)
    _multiply_exactly(nvfp4.repack_nvfp4(weight, "tiled"))
    if torch.cuda.get_device_capability() == (9, 0):
        _multiply_exactly_on_tensor_cores()
        _multiply_tiled_experts(x, nvfp4.repack_nvfp4(experts, "tiled"), ids)
    tiled = nvfp4.repack_nvfp4(one, "tiled")
    for rows in (4, 9):
        nvfp4.gemm_nvfp4(nvfp4.quantize_nvfp4(x[:rows], row_scale=True), tiled, "tc")
        nvfp4.linear_nvfp4(x[:rows], tiled)
    # Few tokens' codes are read by the product itself; many rows are quantized by other kernels than few.
    tiled = nvfp4.repack_nvfp4(nvfp4.quantize_nvfp4(torch.randn(24, 512, device="cuda")), "tiled")
    for rows in (1, 4):
        a = nvfp4.quantize_nvfp4(torch.randn(rows, 512, device="cuda"), row_scale=True)
        nvfp4.gemm_nvfp4(a, tiled, "tc")
    nvfp4.quantize_nvfp4(torch.randn(2050, 250, device="cuda"), row_scale=True)
    torch.cuda.synchronize()


def _multiply_exactly(tiled) -> None:
    """By nvfp4_exact.cu, every number of tokens; teams with more steps of activations than have room."""
    from unittest import mock

    import torch

    from kbit import nvfp4
    from kbit.backends.cuda.nvfp4 import exact

    for tokens in exact.TOKENS:
        a = nvfp4.quantize_nvfp4(torch.randn(tokens + tokens // 8, tiled.shape[1], device="cuda"))
        for teams, splits in ((1, 1), (3, 1), (1, 3)):
            plan = exact.Plan(tokens, rows=2, teams=teams, splits=splits)
            with (
                mock.patch.object(exact, "takes_wgmma", return_value=False),
                mock.patch.object(exact, "plan", return_value=plan),
            ):
                nvfp4.gemm_nvfp4(a, tiled, "exact")


def _multiply_exactly_on_tensor_cores() -> None:
    """By nvfp4_exact_wgmma.cu: products of 256, 64 and 16 columns chained, by a block and by clusters."""
    import torch

    from kbit.backends.cuda.nvfp4 import exact_wgmma
    from kbit.format import nvfp4_layout

    n, k = 152, 1088
    made = torch.Generator("cuda").manual_seed(0)

    def matrix(rows: int, fields: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Any codes, scales of so many octaves."""
        shapes = (rows, k // 2), (rows, k // 16)
        codes, scales = (torch.randint(256, s, device="cuda", generator=made) for s in shapes)
        return codes.byte(), (scales % (8 * fields) + 0x40 - 4 * fields).byte()

    for tokens in exact_wgmma.TOKENS:
        m = tokens + 5
        for fields in (1, 7, 15):
            tiled = nvfp4_layout.to_tiled(*matrix(n, fields))
            for plan in ((tokens, 1, 4), (tokens, 1, 1), (tokens, 3, 3)):
                y = torch.full((m, n), float("nan"), device="cuda")
                operands = (*matrix(m, fields), tiled, 1.0, None, y)
                exact_wgmma.multiply(*operands, exact_wgmma.Plan(*plan))
                assert torch.isfinite(y).all()


def _multiply_tiled_experts(x, experts, ids) -> None:
    """W4A16 by wgmma.cu; W4A4 by nvfp4_exact.cu and nvfp4_exact_wgmma.cu, few rows of an expert and many."""
    from unittest import mock

    import torch

    from kbit import nvfp4
    from kbit.backends.cuda.nvfp4 import moe
    from kbit.nvfp4.expert_products import expert_linear
    from kbit.nvfp4.moe import route

    for repeats in (1, 40):
        rows, routing = x.repeat(2 * repeats, 1), route(ids.repeat(repeats, 1), experts.shape[0])
        assert torch.isfinite(expert_linear(rows, routing, experts)).all()
    nvfp4.moe_gemm_nvfp4(x, experts, ids, dedup="indirect")
    with mock.patch.object(moe, "FEW_ROWS", 0):
        for repeats in (1, 5, 10):
            rows, chosen = x.repeat(repeats, 1), ids.repeat(repeats, 1)
            nvfp4.moe_gemm_nvfp4(rows, experts, chosen, dedup="indirect")


def _operands(m: int, weight, dtype):
    """x [m, K] and a result that is NaN: what the copy engine writes counts as not written for initcheck."""
    import torch

    *_, n, k, gated = weight
    out = torch.full((m, n // 2 if gated else n), torch.nan, device="cuda", dtype=dtype)
    return torch.randn(m, k, device="cuda", dtype=dtype), out


def _as_on(multiprocessors):
    """Launches are planned as on a machine of so many multiprocessors; None: as on this one."""
    import torch

    from kbit.backends.cuda import driver

    limits = driver.device_limits(torch.cuda.current_device())
    planned = limits._replace(multiprocessors=multiprocessors or limits.multiprocessors)
    return mock.patch.object(driver, "device_limits", return_value=planned)


def _multiply_few(weight, dtype, rows, machines=(None,)) -> None:
    """By stream.cu, so many tokens, as launched on machines of so many multiprocessors; None: this one."""
    import torch

    from kbit.backends.cuda import stream

    for m, multiprocessors in product(rows, machines):
        x, out = _operands(m, weight, dtype)
        with _as_on(multiprocessors):
            stream.linear(x, *weight, out)
        assert torch.isfinite(out).all()


def _multiply_by_mma(weight, dtype) -> None:
    """By mma.cu, in every configuration, K in one part and in two."""
    import torch

    from kbit.backends.cuda import driver, mma, mma_config
    from kbit.format.codebook import bits_of
    from kbit.format.symmetry import is_symmetric

    limits = driver.device_limits(torch.cuda.current_device())
    tiled, codebook, *_ = weight
    code = (bits_of(codebook), is_symmetric(codebook))
    sizes = {min(limits.shared_bytes, size * 1024) for size in (99, 163)}
    for config in {config for size in sizes for config in mma_config.configs(*code, size)}:
        row_blocks = -(-tiled.shape[0] // (mma_config.WARP_TILES * config.row_warps))
        x, out = _operands(config.tokens + 9, weight, dtype)
        for parts in (1, 2):
            mma.linear(x, *weight, out.fill_(torch.nan), mma.Plan(config, (row_blocks, 2, parts)))
            assert torch.isfinite(out).all()


def _multiply_many(weight, dtype) -> None:
    """By wgmma.cu, in every kind of launch, on GPUs that have it."""
    import torch

    from kbit.backends.cuda import driver, wgmma, wgmma_config
    from kbit.format.codebook import bits_of

    if driver.device_arch(torch.cuda.current_device()) != wgmma.ARCH:
        return
    bits, k, gated = bits_of(weight[1]), *weight[-2:]
    of_rows = ((16, 1, 2), (32, 2, 1), (32, 2, 2), (48, 2, 2), (64, 3, 1), (64, 1, 2), (88, 1, 2), (96, 2, 1))
    found = [(wgmma_config.Tiling(tokens, cluster), teams) for tokens, cluster, teams in of_rows]
    found += [(wgmma_config.Tiling(96, 2), 2), (wgmma_config.Tiling(256, 1), 1)]
    found += [(wgmma_config.Tiling(176, 1, multicast=True), 1)]
    if not gated:
        half = [wgmma_config.Tiling(tokens, 1, rows=64) for tokens in (16, 64, 80, 112, 128)]
        half += [half[1]._replace(narrow=True), half[1]._replace(cluster=2)]
        wide = [wgmma_config.Tiling(tokens, cluster, rows=192) for tokens, cluster in ((96, 2), (128, 1))]
        found += [*((tiling, 2) for tiling in half), *((tiling, 1) for tiling in wide)]
    for tiling, teams in found:
        block = wgmma_config.of_tiling(bits, tiling, teams, grouped=False, nvfp4=False)
        if tiling.cluster == 1 or block.splits(k, tiling.cluster):
            x, out = _operands(tiling.tokens + 30, weight, dtype)
            wgmma.linear(x, *weight, out, wgmma.Plan(tiling, 2 * tiling.cluster * tiling.sharers, teams))
            assert torch.isfinite(out).all()


def _multiply_experts(tiled, codebook, sizes, dtype) -> None:
    """Rows sorted by expert: found by moe_align, multiplied by every kernel, summed by moe_combine.

    One token's also without sorting. By grouped.cu also as on a machine of one multiprocessor, whose block
    has more warps, and each of them several units.
    """
    import torch

    from kbit.backends.cuda import driver, grouped, mma, one_token, resident, wgmma

    hopper = driver.device_arch(torch.cuda.current_device()) == wgmma.ARCH
    n, k, gated = sizes
    ops, scale = torch.ops.kbit, torch.ones(5, device="cuda")
    for tokens, choices in ((1, 2), (9, 3), (70, 2)):
        ids = torch.randint(0, 6, (tokens, choices), device="cuda", dtype=torch.int32)
        ids[0, 0] = 5  # not mine
        source, bounds, inverse = ops.moe_align(ids, 5)
        x = torch.randn(tokens, k, device="cuda", dtype=dtype)
        weights = torch.rand(tokens, choices, device="cuda", dtype=dtype)
        shape = (tokens * choices, n // 2 if gated else n)
        out = torch.full(shape, torch.nan, device="cuda", dtype=dtype)
        for settled, multiprocessors in product((False, True), (None, 1)):
            problem = (x, tiled, codebook, scale, bounds, source, *sizes, out.fill_(torch.nan))
            with _as_on(multiprocessors):
                grouped.linear(*problem, settled=settled)
            assert torch.isfinite(out).all()
        if hopper:
            resident.linear(x, tiled, codebook, scale, bounds, source, *sizes, out.fill_(torch.nan))
            assert torch.isfinite(out).all()
        if hopper and tokens == 1:
            one_token.rows(x, tiled, codebook, scale, ids[0], *sizes, out.fill_(torch.nan))
            assert torch.isfinite(out).all()
            if not gated:
                rows = torch.randn(choices, k, device="cuda", dtype=dtype)
                sums = torch.full((1, n), torch.nan, device="cuda", dtype=dtype)
                one_token.columns(rows, tiled, codebook, scale, ids[0], weights[0], n, k, sums)
                assert torch.isfinite(sums).all()
        experts = (x[source.long()], tiled, codebook, scale, bounds, *sizes)
        mma.grouped_linear(*experts, out.fill_(torch.nan))
        assert torch.isfinite(out).all()
        if hopper:
            _multiply_sorted(experts, out)
        assert torch.isfinite(ops.moe_combine(out, inverse, weights, bounds)).all()


def _multiply_sorted(experts, out) -> None:
    """By wgmma.cu, as planned, and by few blocks of teams with several tiles each."""
    import torch

    from kbit.backends.cuda import wgmma, wgmma_config
    from kbit.format.codebook import bits_of

    wgmma.grouped_linear(*experts, out.fill_(torch.nan))
    _, _, codebook, _, bounds, *_, gated = experts
    for block in wgmma_config.grouped_blocks(bits_of(codebook), gated):
        if block.apart:
            plan = wgmma.Plan(block.tiling(1), 2, block.teams)
            wgmma.grouped_linear(*experts, out.fill_(torch.nan), plan)
            assert torch.isfinite(out[bounds[0] : bounds[-1]]).all()


PARTS = {f"{bits} bits": partial(run_cases, bits) for bits in (2, 3, 4, 5)} | {
    "5 bits, any codebook": partial(run_cases, 5, symmetric=False),
    "sort": run_around_products,
    "ranks": run_ranks,
    "nvfp4": run_nvfp4,
}


def check(tool: str, part: str) -> dict[str, Any]:
    """Run one part under one tool."""
    flags = os.environ.get("KBIT_CUDA_FLAGS", "")
    if tool == "racecheck":
        flags += " -DKBIT_ALL_LANES_ARRIVE"
    command = ["compute-sanitizer", "--tool", tool]
    # cuda-bindings asks the driver for functions that it may lack: refused calls are no memory errors.
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    result = subprocess.run(
        [*command, sys.executable, __file__, "--cases", part],
        env={**os.environ, "KBIT_CUDA_FLAGS": flags.strip()},
        capture_output=True,
        text=True,
    )
    lines = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", result.stdout)
    print(f"{tool}, {part}", *lines, sep="\n  ")
    if not clean(result.returncode, lines):
        print(result.stdout[-8000:], result.stderr[-8000:], sep="\n")
    return {"tool": tool, "exit_code": result.returncode, "summary": lines or ["no summary"]}


def merge(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each tool: the worst exit code, every summary that differs."""
    merged: dict[str, dict[str, Any]] = {}
    for run in runs:
        into = merged.setdefault(run["tool"], {"tool": run["tool"], "exit_code": 0, "summary": []})
        into["exit_code"] = into["exit_code"] or run["exit_code"]
        into["summary"] += [line for line in run["summary"] if line not in into["summary"]]
    return list(merged.values())


def clean(exit_code: int, lines: list[str]) -> bool:
    """Whether the cases ran to their end and nothing was found; the tool itself exits as they do."""
    return exit_code == 0 and bool(lines) and all(re.search(r"SUMMARY: 0 \w+", line) for line in lines)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="JSON for the summary")
    parser.add_argument("--cases", choices=PARTS, help="launch the kernels of this part, without a tool")
    parser.add_argument("--jobs", type=int, default=min(6, os.cpu_count() or 1), help="processes at a time")
    arguments = parser.parse_args()
    if arguments.cases is not None:
        PARTS[arguments.cases]()
        return
    if arguments.file is None:
        parser.error("the file for the summary is missing: benchmarks/results/sanitizer.json, say.")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer is not on PATH; it is in the bin folder of CUDA's toolkit.")
    from kbit.bench.gpu_timing import describe

    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = merge(list(pool.map(check, *zip(*product(TOOLS, PARTS), strict=True))))
    result = {"machine": describe(), "shapes": [*SHAPES, *LONG], "runs": runs}
    arguments.file.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(not all(clean(run["exit_code"], run["summary"]) for run in runs))


if __name__ == "__main__":
    main()
