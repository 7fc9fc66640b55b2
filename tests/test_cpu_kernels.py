"""The C++ kernels of every instruction set this machine has, against the PyTorch reference."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch

from kbit.backends import cpu
from kbit.format import SUPPORTED_BITS, get_codebook, reference
from kbit.format.codebook import midpoints
from kbit.quantizers import quantize
from kbit.quantizers.scale_search import WINDOWS

if not cpu.available():
    pytest.skip(str(cpu.unavailable_reason()), allow_module_level=True)

ISAS = cpu.supported_isas()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
SHAPES = [(1, 1), (17, 33), (1, 576), (40, 576), (70, 1000), (5, 2080), (33, 4128)]
TOKENS = [0, 1, 2, 3, 4, 5, 16, 17, 33, 64, 65, 130]
CANARY = 7.5


@pytest.fixture(autouse=True)
def _fused_kernels_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here are the C++ kernels, at any number of tokens; panels have a test of their own."""
    monkeypatch.setattr(cpu, "panels_win", lambda *_: False)


def codebook_for(kind: str, bits: int) -> torch.Tensor:
    if kind == "one-sided":
        return torch.linspace(0, 1, 2**bits)
    if kind == "asymmetric":
        return (torch.linspace(-0.4, 1, 2**bits) + 0.013).clamp_max(1.0)
    return get_codebook("nf", bits)


def make_weight(
    n: int, k: int, bits: int, kind: str = "nf", absmax: str = "e4m4", experts: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * 7919 + k * 31 + bits)
    shape = (n, k) if experts is None else (experts, n, k)
    codebook = codebook_for(kind, bits)
    packed, scales, factor = quantize(
        torch.randn(shape, generator=generator) * 0.05, codebook, absmax, search=False
    )
    return packed, scales, codebook, factor


def guarded(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned contiguous tensor inside a longer buffer, whose last 64 elements must stay as they are."""
    buffer = torch.full((torch.Size(shape).numel() + 64,), CANARY, dtype=dtype)
    inner = buffer[: torch.Size(shape).numel()].view(shape)
    inner.fill_(float("nan"))
    return inner, buffer[-64:]


def run_linear(
    x: torch.Tensor, weight: tuple[torch.Tensor, ...], bias: torch.Tensor | None, isa: str
) -> torch.Tensor:
    out, guard = guarded(x.shape[0], weight[0].shape[0], dtype=x.dtype)
    cpu.linear(x, *weight, bias, x.shape[1], out, isa=isa)
    assert bool((guard == CANARY).all())
    return out


def assert_within_bound(
    out: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """|out - exact| <= (operand rounding + K float32 roundings) * sum |x w| + one rounding of the result."""
    exact = x.double() @ w.double().T
    magnitude = x.double().abs() @ w.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    operand = UNIT_ROUNDOFF[out.dtype]  # weights may be rounded to T or not
    bound = magnitude * (operand + x.shape[1] * 2.0**-24 + 2.0**-22) + exact.abs() * operand + 1e-7
    assert bool(((out.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("search", [False, True])
def test_quantize_equals_reference(isa: str, bits: int, search: bool) -> None:
    for kind in ("nf", "one-sided", "asymmetric"):
        codebook = codebook_for(kind, bits)
        for n, k in [(1, 1), (17, 33), (40, 576), (3, 1000)]:
            for dtype in DTYPES:
                w = torch.randn(n, k).mul(0.05).to(dtype)
                w[:, : min(k, 32)] = 0  # a block of zeros
                w[0, 0] = -0.0
                window = WINDOWS[bits] if search else None
                got = cpu.quantize(w, codebook, midpoints(codebook), bits, window, isa=isa)
                for have, want in zip(got, quantize(w, codebook, "e4m4", search), strict=True):
                    assert torch.equal(have, want), (kind, n, k, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("magnitude", [1e-38, 1e-6, 1e-3, 40.0, 1e6, 1e37])
def test_quantize_scales_matrices_apart(isa: str, magnitude: float) -> None:
    w = torch.randn(3, 6, 70)
    w[1] *= magnitude
    w[2] = 0
    codebook = get_codebook("nf", 4)
    for window in (None, WINDOWS[4]):
        got = cpu.quantize(w, codebook, midpoints(codebook), 4, window, isa=isa)
        want = quantize(w, codebook, "e4m4", window is not None)
        for have, expected in zip(got, want, strict=True):
            assert torch.equal(have, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_quantize_rounds_scales_and_ties_like_the_reference(isa: str) -> None:
    """Block maxima at every E4M4 value, midway and just beside; weights on midpoints of levels."""
    codebook = get_codebook("nf", 3)
    values = torch.tensor(
        [2.0**-10 * m / 16 for m in range(32)]
        + [2.0**e * (1 + m / 16) for e in range(-9, 5) for m in range(16)]
    )
    middle = (values[1:] + values[:-1]) / 2
    amax = torch.cat(
        [
            values,
            middle,
            torch.nextafter(middle, torch.tensor(0.0)),
            torch.nextafter(middle, torch.tensor(9e9)),
        ]
    )
    w = torch.zeros(amax.numel(), 32)
    w[:, 1:8] = amax[:, None] * midpoints(codebook)
    w[:, 0] = amax
    got = cpu.quantize(w, codebook, midpoints(codebook), 3, None, isa=isa)
    for have, want in zip(got, quantize(w, codebook, "e4m4", False), strict=True):
        assert torch.equal(have, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_counts_nan_and_inf(isa: str, dtype: torch.dtype) -> None:
    w = torch.ones(2, 5, 40, dtype=dtype)
    w[0, 1, 39] = float("nan")
    w[1, 4, 2] = float("-inf")
    codebook = get_codebook("nf", 4)
    with pytest.raises(ValueError, match="2 NaN or Inf values"):
        cpu.quantize(w, codebook, midpoints(codebook), 4, None, isa=isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absmax", ["e4m4", "float16", "float32"])
def test_dequantize_equals_reference(isa: str, bits: int, dtype: torch.dtype, absmax: str) -> None:
    for kind in ("nf", "one-sided", "asymmetric"):
        for n, k in SHAPES:
            weight = make_weight(n, k, bits, kind, absmax)
            out, guard = guarded(n, k, dtype=dtype)
            cpu.dequantize(*weight, k, out, isa=isa)
            assert torch.equal(out, reference.dequantize(*weight, k, dtype)), (kind, n, k)
            assert bool((guard == CANARY).all())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_decodes_every_scale_byte_and_factor(isa: str, bits: int, dtype: torch.dtype) -> None:
    packed = torch.randint(-(2**31), 2**31 - 1, (2, 4, 64 * bits), dtype=torch.int32)
    absmax = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(2, 1, 1)
    factor = torch.tensor([2.0**-120, 2.0**3])
    codebook = get_codebook("nf", bits)
    out, _ = guarded(2, 4, 2048, dtype=dtype)
    cpu.dequantize(packed, absmax, codebook, factor, 2048, out, isa=isa)
    assert torch.equal(out, reference.dequantize(packed, absmax, codebook, factor, 2048, dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_hot_activations_return_decoded_weights(isa: str, bits: int, dtype: torch.dtype) -> None:
    cases = [("nf", "e4m4"), ("asymmetric", "float16"), ("one-sided", "float32")]
    for (n, k), (kind, absmax) in zip([(17, 33), (33, 300), (9, 576)], cases, strict=True):
        weight = make_weight(n, k, bits, kind, absmax)
        want = reference.dequantize(*weight, k, dtype).T
        eye = torch.eye(k, dtype=dtype)
        for tokens in (1, 2, 3, 4, 5, 16, 17, k):
            for begin in range(0, k, tokens if tokens > 4 else 29):
                x = eye[begin : begin + tokens].contiguous()
                assert torch.equal(run_linear(x, weight, None, isa), want[begin : begin + tokens]), (
                    tokens,
                    kind,
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_within_error_bound_at_any_shape(isa: str, bits: int, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        weight = make_weight(n, k, bits)
        decoded = reference.dequantize(*weight, k, dtype)
        for tokens in TOKENS:
            x = torch.randn(tokens, k).to(dtype)
            bias = torch.randn(n).to(dtype) if tokens % 2 else None
            out = run_linear(x, weight, bias, isa)
            assert_within_bound(out, x, decoded, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_by_many_tokens_and_panels(
    isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of the fused kernel, then panels of torch's matmul, the last one partial."""
    weight = make_weight(200, 576, 4)
    x = torch.cat([torch.eye(576), torch.randn(24, 576)]).to(dtype)
    decoded = reference.dequantize(*weight, 576, dtype)
    bias = torch.randn(200).to(dtype)
    for use_panels in (False, True) if dtype != torch.float16 else (False,):
        monkeypatch.setattr(cpu, "panels_win", lambda *_, answer=use_panels: answer)
        monkeypatch.setattr("kbit.backends.cpu.panels.PANEL_BYTES", 64 * 576 * 2)
        assert torch.equal(run_linear(x, weight, None, isa)[:576], decoded.T)
        assert_within_bound(run_linear(x, weight, bias, isa), x, decoded, bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_repeat_for_any_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    weight = make_weight(700, 1056, 4)
    before = torch.get_num_threads()
    try:
        for tokens in (1, 4, 17, 65):
            x = torch.randn(tokens, 1056).to(dtype)
            torch.set_num_threads(1)
            first = run_linear(x, weight, None, isa)
            for threads in (1, 2, 2, 3, 7):
                torch.set_num_threads(threads)
                assert torch.equal(run_linear(x, weight, None, isa), first)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [[0, 0, 3, 3, 40], [2, 3, 4, 5, 6], [0, 45, 45, 45, 45], [5, 5, 5, 5, 5]])
def test_grouped_linear(isa: str, dtype: torch.dtype, bounds: list[int]) -> None:
    n, k = 70, 160
    weight = make_weight(n, k, 4, experts=4)
    decoded = reference.dequantize(*weight, k, dtype)
    x = torch.randn(45, k).to(dtype)
    out, guard = guarded(45, n, dtype=dtype)
    cpu.grouped_linear(x, *weight, torch.tensor(bounds, dtype=torch.int32), k, out, isa=isa)
    assert bool((guard == CANARY).all())
    covered = torch.zeros(45, dtype=torch.bool)
    for expert, (begin, end) in enumerate(itertools.pairwise(bounds)):
        covered[begin:end] = True
        assert_within_bound(out[begin:end], x[begin:end], decoded[expert], None)
        alone = run_linear(
            x[begin:end].contiguous(),
            (weight[0][expert], weight[1][expert], weight[2], weight[3][expert]),
            None,
            isa,
        )
        assert torch.equal(out[begin:end], alone)
    assert bool((out[~covered] == 0).all())


@pytest.mark.parametrize("bounds", [[0, 5, 4, 6, 6], [0, 1, 2, 3, 7], [-1, 1, 2, 3, 4]])
def test_grouped_linear_refuses_bad_offsets(bounds: list[int]) -> None:
    weight = make_weight(8, 64, 4, experts=4)
    with pytest.raises(ValueError, match="expert_offsets must ascend"):
        cpu.grouped_linear(
            torch.ones(6, 64), *weight, torch.tensor(bounds, dtype=torch.int32), 64, torch.empty(6, 8)
        )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_decodes_rows(isa: str, bits: int, dtype: torch.dtype) -> None:
    weight = make_weight(50, 577, bits)
    ids = torch.tensor([49, 0, 7, 7, 31])
    out, guard = guarded(5, 577, dtype=dtype)
    cpu.embedding(ids, *weight, 577, out, isa=isa)
    assert torch.equal(out, reference.dequantize(*weight, 577, dtype)[ids])
    assert bool((guard == CANARY).all())


@pytest.mark.parametrize("bad", [-1, 50])
def test_embedding_refuses_ids_out_of_range(bad: int) -> None:
    weight = make_weight(50, 64, 4)
    with pytest.raises(IndexError, match=rf"id {bad} at position 1 is outside 0..49"):
        cpu.embedding(torch.tensor([3, bad]), *weight, 64, torch.empty(2, 64))


@pytest.mark.parametrize("isa", ISAS)
def test_python_threads_at_once(isa: str) -> None:
    weight = make_weight(600, 2048, 4)
    inputs = [torch.randn(tokens, 2048) for tokens in (1, 3, 20, 70)]
    want = [run_linear(x, weight, None, isa) for x in inputs]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(10):
            if not torch.equal(run_linear(inputs[which], weight, None, isa), want[which]):
                wrong.append(which)

    workers = [threading.Thread(target=work, args=(i % 4,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_works_in_a_forked_child() -> None:
    """A child has none of the parent's OpenMP threads: waiting for them would hang."""
    weight = make_weight(600, 2048, 4)
    x = torch.randn(3, 2048)
    want = run_linear(x, weight, None, ISAS[0])
    child = os.fork()
    if child == 0:
        out = torch.empty_like(want)
        cpu.linear(x, *weight, None, 2048, out)
        os._exit(0 if out.tolist() == want.tolist() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_works_in_a_child_forked_ahead_of_the_first_call() -> None:
    """torch's own loops have started the threads by then."""
    code = """
import os, signal, torch
from kbit.backends import cpu
from kbit.format.codebook import midpoints, normal_float
torch.set_num_threads(2)
weight, levels = torch.ones(1 << 22).exp()[: 1 << 20].view(512, 2048), normal_float(4)
child = os.fork()
if child == 0:
    signal.alarm(60)
    cpu.quantize(weight, levels, midpoints(levels), 4, None)
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("processes", [1, 3])
def test_works_where_no_more_threads_may_be_started(processes: int) -> None:
    """As in containers that bound them: in a forked child, which has threads of its own."""
    code = f"""
import os, resource, signal, kbit, torch
from kbit.backends import cpu
torch.set_num_threads(8)
x, q = torch.randn(3, 2048), kbit.quantize(torch.randn(600, 2048), 4, search=False)
weight, want, out = (q.packed, q.absmax, q.codebook, q.scale), torch.empty(3, 600), torch.zeros(3, 600)
cpu.linear(x, *weight, None, 2048, want)
child = os.fork()
if child == 0:
    signal.alarm(60)
    if os.getuid() == 0:  # whom no limit holds
        os.setgid(65534)
        os.setuid(54321)
    resource.setrlimit(resource.RLIMIT_NPROC, ({processes}, {processes}))
    cpu.linear(x, *weight, None, 2048, out)
    os._exit(0 if torch.equal(out, want) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_and_given_back() -> None:
    """What is prepared of x would be 128 MB."""
    code = """
import kbit, torch

def memory(what):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(what)) >> 10  # MB

q, stack = (kbit.quantize(torch.randn(*e, 64, 4096), 4, search=False) for e in ((), (2,)))
x, offsets = torch.ones(8192, 4096, dtype=torch.float16), torch.tensor([0, 4096, 8192], dtype=torch.int32)
kbit.linear(x[:4], q), kbit.grouped_linear(x[:8], stack, offsets // 1024)  # which start what they need
resident, most = memory("VmRSS"), memory("VmHWM")
kbit.linear(x, q)
print(memory("VmHWM") - most)
kbit.grouped_linear(x, stack, offsets)
print(memory("VmRSS") - resident)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(int(more) < 64 for more in run.stdout.split()), run.stdout


@pytest.mark.parametrize("isa", ISAS)
def test_more_tokens_than_are_prepared_at_a_time_give_the_same(isa: str) -> None:
    """Of 8192 features that are 512."""
    packed, absmax, codebook, scale = make_weight(8, 8192, 4, experts=2)
    weights = [(packed[e], absmax[e], codebook, scale[e]) for e in range(2)]
    x, bias = torch.randn(1400, 8192), torch.randn(8)
    parts = [run_linear(part, weights[0], bias, isa) for part in x.split(256)]
    assert torch.equal(run_linear(x, weights[0], bias, isa), torch.cat(parts))
    bounds, out = [3, 600, 1390], torch.full((1400, 8), float("nan"))
    offsets = torch.tensor(bounds, dtype=torch.int32)
    cpu.grouped_linear(x, packed, absmax, codebook, scale, offsets, 8192, out, isa=isa)
    for weight, begin, end in zip(weights, bounds, bounds[1:], strict=False):
        assert torch.equal(out[begin:end], run_linear(x[begin:end], weight, None, isa))
    assert not out[:3].any()
    assert not out[1390:].any()


def test_panels_are_multiplied_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(64, 128, 4), (torch.randn(40, 128) * 1e5).bfloat16()  # no float16
    monkeypatch.setattr(cpu, "panels_win", lambda *_: True)
    want = run_linear(x, weight, None, ISAS[0])
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(run_linear(x, weight, None, ISAS[0]), want)


def test_wrong_sizes_are_refused() -> None:
    packed, absmax, codebook, scale = make_weight(8, 64, 4)
    with pytest.raises(ValueError, match="absmax has not"):
        cpu.linear(torch.ones(1, 128), packed, absmax, codebook, scale, None, 128, torch.empty(1, 8))
    with pytest.raises(ValueError, match="packed has not"):
        cpu.dequantize(packed[:, :4].contiguous(), absmax, codebook, scale, 64, torch.empty(8, 64))


def test_unknown_instruction_set_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=r"'sse9' cannot be used on this machine; supported: .*portable"):
        cpu.dequantize(*make_weight(8, 64, 4), 64, torch.empty(8, 64), isa="sse9")
    code = "from kbit.backends import cpu; print(cpu.isa())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KBIT_CPU_ISA": "portable"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "portable"


@pytest.mark.parametrize("name", ["avx512_nobf16", "avx2_nogfni"])
def test_plain_variant_answers_to_the_short_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that has only the plain variant of an instruction set."""
    short = name.partition("_")[0]
    monkeypatch.setattr(cpu, "_isa_names", lambda: (name, "portable"))
    assert cpu._isa_index.__wrapped__(short) == cpu._isa_index.__wrapped__(name) == 0
    monkeypatch.setattr(cpu, "_isa_index", lambda _: 0)
    assert cpu.isa() == short
