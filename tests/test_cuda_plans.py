"""Which CUDA kernel takes what, and in which launch; no GPU is needed."""

from __future__ import annotations

import itertools

import pytest
import torch

import kbit
from kbit.backends import cpu
from kbit.backends.cuda import (
    grouped,
    grouped_preference,
    operands,
    preference,
    resident,
    stream,
    stream_config,
    wgmma,
    wgmma_config,
    wgmma_estimate,
)
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import SUPPORTED_BITS

DEVICES = [
    DeviceLimits(108, 163 * 1024, "80"),
    DeviceLimits(128, 99 * 1024, "89"),
    DeviceLimits(132, 227 * 1024, "90a"),
    DeviceLimits(148, 227 * 1024, "100a"),
]
SHAPES = [(1, 1), (512, 2048), (2048, 5120), (28672, 8192), (8192, 28672), (262144, 8192), (96, 576)]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_every_small_batch_plan_fits_and_covers(device: DeviceLimits) -> None:
    for bits, m, (n, k), gated in itertools.product(SUPPORTED_BITS, (1, 2, 8, 9, 16), SHAPES, (False, True)):
        if stream.refusal(m, torch.float16, n, gated):
            continue
        plan = stream.plan(m, WeightShape(n, k, bits, gated, device))
        case = (bits, m, n, k, gated, plan)
        units = -(-n // 16) // (2 if gated else 1)
        assert plan.shared_bytes <= device.shared_bytes, case
        assert plan.grid % plan.cluster == 0, case
        assert 1 <= plan.grid // plan.cluster <= units, case
        assert plan.cluster <= -(-k // 256), case
        assert plan.config.split == (plan.cluster > 1), case
        assert plan.tokens >= m, case
        assert 1 <= plan.workers <= plan.config.workers, case
        assert plan.config in stream.configs(bits, plan.tokens, device.shared_bytes, device.arch), case
        assert plan.ring_at % 128 == 0, case


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize(("bits", "nvfp4"), [*((bits, False) for bits in SUPPORTED_BITS), (4, True)])
def test_every_small_batch_configuration_is_chosen(device: DeviceLimits, bits: int, nvfp4: bool) -> None:
    shares = (0.1, 0.6, 1.3, 2.4, 4.5, 9)  # row tiles for each multiprocessor
    chosen = set()
    for m, groups, share in itertools.product(range(1, 17), (*range(1, 30), 33, 45, 80, 113), shares):
        rows = 16 * int(share * device.multiprocessors)
        plan = stream.plan(m, WeightShape(rows, 256 * groups, bits, False, device), nvfp4)
        chosen.add((plan.tokens, plan.config))
    limits = (device.shared_bytes, device.arch)
    for tokens in stream_config.classes(nvfp4):
        for config in stream_config.configs(bits, tokens, *limits, nvfp4=nvfp4):
            assert (tokens, config) in chosen, (tokens, config)


def dealings(rows: int, experts: int) -> list[torch.Tensor]:
    """Ways to deal rows to experts: one has all, evenly, at random, with a preference."""
    one = torch.zeros(experts, dtype=torch.long)
    one[experts // 2] = rows
    evenly = torch.arange(rows).bincount(minlength=experts) if rows <= experts else None
    even = torch.full((experts,), rows // experts)
    even[: rows % experts] += 1
    favoured = 1.0 / torch.arange(1, experts + 1)
    drawn = [
        torch.multinomial(weights, rows, replacement=True).bincount(minlength=experts)
        for weights in (torch.ones(experts), favoured)
    ]
    return [one, even if evenly is None else evenly, *drawn]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_grouped_plans_fit_and_have_room_for_every_dealing(device: DeviceLimits) -> None:
    sizes = [(8, 512, 2048), (8, 2048, 512), (128, 512, 2048), (512, 1024, 2048), (60, 96, 5120)]
    counts_of_rows = (1, 10, 64, 333, 2048, 200_000)
    for bits, (experts, n, k), rows in itertools.product(SUPPORTED_BITS, sizes, counts_of_rows):
        plan = grouped.plan(rows, experts, WeightShape(n, k, bits, False, device))
        case = (bits, experts, n, k, rows, plan)
        assert plan is not None, case
        assert plan.config.blocks * (plan.shared_bytes + 1024) <= device.shared_bytes + 1024, case
        assert plan.config in grouped.configs(bits, plan.tokens, device.shared_bytes), case
        assert plan.x_room >= -(-k // 64) * 128 * plan.most, case
        room, units = (plan.parts_at - plan.jobs_at) // 20 - 1, -(-n // 32)
        for counts in dealings(rows, experts):
            every = int((-(-counts // plan.most)).sum()) * units
            shares = torch.full((plan.grid,), every // plan.grid)
            shares[: every % plan.grid] += 1
            ends = shares.cumsum(0)
            pieces = (ends - 1) // units - (ends - shares) // units + 1
            assert int(pieces[shares > 0].max()) <= room, case


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_teams_of_grouped_are_whole(device: DeviceLimits) -> None:
    """Warps of a team wait for each other."""
    sizes = [(512, 2048), (1024, 2048), (2048, 512), (32, 8192), (1536, 2048), (2112, 4096)]
    for bits, experts, (n, k) in itertools.product(SUPPORTED_BITS, (1, 8, 64, 512), sizes):
        for rows in (1, 2, 4, 6, 10, 20, 40, 80, 300, 1280, 5000):
            plan = grouped.plan(rows, experts, WeightShape(n, k, bits, False, device))
            assert plan is not None
            assert plan.config.warps % plan.span == 0, (bits, experts, n, k, rows, plan)


def test_what_resident_does_not_take() -> None:
    device = next(device for device in DEVICES if device.arch == resident.ARCH)

    def words(
        experts: int, n: int, k: int, dtype: torch.dtype = torch.float16, device: DeviceLimits = device
    ):
        return resident.refusal(dtype, experts, WeightShape(n, k, 4, False, device))

    assert words(8, 512, 2048) is None
    assert words(8, 512, 2049) == "it takes up to 2048 columns, got 2049"
    assert words(64, 512, 2048) == "64 experts' weights do not fit in the multiprocessors' shared memory"
    assert words(8, 512, 2048, torch.float32) == "it takes float16 and bfloat16, got torch.float32"
    assert words(8, 512, 2048, device=DEVICES[0]) == "it is for sm_90a, this is sm_80"


def test_resident_plans_fit_and_hold_every_unit() -> None:
    device = next(device for device in DEVICES if device.arch == resident.ARCH)
    sizes = [(8, 512, 2048), (8, 2048, 512), (16, 512, 2048), (3, 96, 1984), (1, 16, 64), (70, 100, 100)]
    chosen = set()
    for bits, (experts, n, k), rows in itertools.product(SUPPORTED_BITS, sizes, (1, 8, 64, 200, 2000)):
        plan = resident.plan(rows, experts, WeightShape(n, k, bits, False, device))
        case = (bits, experts, n, k, rows, plan)
        assert plan is not None, case
        units, k_tiles = -(-n // 32) * experts, -(-k // 64)
        assert plan.each * plan.grid + plan.rest == units, case
        assert plan.span <= min(k_tiles, plan.config.warps), case
        assert plan.span * plan.config.tiles >= k_tiles, case
        assert plan.config.blocks * (plan.shared_bytes + 1024) <= device.shared_bytes + 1024, case
        assert plan.config in resident.configs(bits), case
        x_bytes, sum_bytes = 128 * k_tiles * plan.tokens, 128 * plan.config.warps * plan.tokens
        weights_end = plan.weights_at + plan.weight_bytes
        assert operands.TABLE_BYTES + 8 * plan.config.warps <= plan.weights_at, case
        if not plan.config.in_holes:
            assert weights_end <= plan.x_at < weights_end + 128, case
            assert plan.x_at % 128 == 0, case
            assert plan.parts_at == plan.x_at + x_bytes, case
            assert plan.parts_at + sum_bytes == plan.shared_bytes, case
        elif plan.tokens == 8:
            assert 2 * x_bytes <= operands.TABLE_BYTES, case
            assert (plan.parts_at, plan.parts_at + sum_bytes) == (weights_end, plan.shared_bytes), case
        else:  # every other 128 bytes of the table
            assert (plan.parts_at, weights_end) == (2 * x_bytes + 128, plan.shared_bytes), case
            assert 2 * (x_bytes + sum_bytes) <= operands.TABLE_BYTES, case
        chosen.add((bits, plan.tokens, plan.config))
    for bits, tokens in itertools.product(SUPPORTED_BITS, resident.TOKENS):
        for config in resident.configs(bits):
            assert (bits, tokens, config) in chosen, (bits, tokens, config)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_what_grouped_takes_it_takes_with_any_number_of_rows(device: DeviceLimits) -> None:
    sizes = [(8, 4096, 14336), (8, 4096, 9216), (128, 4096, 4096), (256, 2048, 7168), (8, 2048, 16384)]
    for bits, (experts, n, k) in itertools.product(SUPPORTED_BITS, sizes):
        weight = WeightShape(n, k, bits, False, device)
        refusal = grouped.refusal(torch.float16, experts, weight)
        small = device.shared_bytes < 100 * 1024
        assert (refusal is None) == (not (small and bits == 2 and k > 12288)), (bits, experts, n, k, refusal)
        if refusal is None:
            for rows in (1, 7, 100, 3000, 20_000, 170_000, 2**20):
                assert grouped.plan(rows, experts, weight) is not None, (weight, experts, rows)


def test_every_wgmma_plan_fits() -> None:
    device = DEVICES[2]
    for bits, m, (n, k), gated in itertools.product(
        SUPPORTED_BITS, (1, 17, 64, 300, 8192), SHAPES, (False, True)
    ):
        if operands.refusal(torch.bfloat16, n, gated):
            continue
        plan = wgmma.plan(m, WeightShape(n, k, bits, gated, device))
        block = wgmma_config.of_tiling(bits, plan.tiling, plan.teams, grouped=False, nvfp4=False)
        assert plan.grid % (plan.tiling.cluster * plan.tiling.sharers) == 0
        assert block in wgmma_config.configs()
        assert block.steps_of(k) >= plan.tiling.cluster * plan.teams


@pytest.mark.parametrize("config", wgmma_config.configs(), ids=str)
def test_every_wgmma_block_fits(config: wgmma_config.Config) -> None:
    """A team decodes a step while it multiplies another, so that each needs two."""
    assert wgmma_config.shared_bytes(config) <= DEVICES[2].shared_bytes
    # wgmma.cuh loads words two turns ahead where it spreads products over look-ups.
    spread = config.teams == 1 or (config.warpgroups == 4 and config.bits == 4)
    assert wgmma_config.stages(config) >= (3 if spread else 2) * config.teams
    assert wgmma_config.stages(config) % config.teams == 0


@pytest.mark.parametrize(
    ("m", "dtype", "arch", "kernel"),
    [
        (1, torch.float16, "90a", "stream"),
        (8, torch.bfloat16, "90a", "stream"),
        (9, torch.bfloat16, "90a", "wgmma"),
        (16, torch.bfloat16, "80", "stream"),
        (17, torch.bfloat16, "89", "mma"),
        (1024, torch.float16, "80", "mma"),
        (1025, torch.float16, "80", "cublas"),
        (1, torch.float32, "90a", "cublas"),
        (4096, torch.float16, "90a", "wgmma"),
    ],
)
def test_who_takes_what(m, dtype, arch, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    assert preference.choose(m, dtype, 4096, 4096, False, arch) == kernel


def test_small_weights_for_many_tokens_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    assert preference.choose(4096, torch.float16, 512, 2048, False, "90a") == "cublas"


def test_a_kernel_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBIT_KERNEL", "wgmma")
    assert preference.choose(1, torch.float16, 4096, 4096, False, "90a") == "wgmma"
    with pytest.raises(ValueError, match=r"KBIT_KERNEL=wgmma cannot run this: it needs a Hopper GPU"):
        preference.choose(1, torch.float16, 4096, 4096, False, "80")
    monkeypatch.setenv("KBIT_KERNEL", "marlin")
    with pytest.raises(
        ValueError, match=r"KBIT_KERNEL is 'marlin'; known: stream, grouped, resident, wgmma, mma, cublas"
    ):
        preference.choose(1, torch.float16, 4096, 4096, False, "90a")


def test_reasons_name_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    words = preference.reasons(40, torch.bfloat16, WeightShape(4096, 4096, 4, False, DEVICES[0]))
    assert words["stream"].startswith("could take it")
    assert words["mma"].startswith("taken by estimate: ")
    assert words["wgmma"] == "it needs a Hopper GPU (sm_90), this is sm_80"
    assert words["cublas"] == "could take it"
    words = preference.reasons(40, torch.bfloat16, WeightShape(4096, 4096, 4, False, DEVICES[2]))
    assert "tokens in clusters of" in words["wgmma"]


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_no_tokens_are_explained_as_some_are(device: DeviceLimits) -> None:
    words = preference.reasons(0, torch.float16, WeightShape(512, 2048, 4, False, device))
    assert words["stream"] == "it takes 1 to 16 tokens, got 0"
    assert any(word.startswith("taken ") for word in words.values())


def test_explain_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_BACKEND", raising=False)
    q = kbit.quantize(torch.randn(64, 256), 4)
    lines = kbit.explain((3, 1, 256), q).splitlines()
    assert lines[0] == "3 tokens of 256 -> 64, 4 bits, bfloat16 on cpu"
    assert lines[1] == "backend cuda: the CUDA kernels need CUDA tensors, got cpu"
    if cpu.available():
        assert lines[2] == "backend cpu: taken"
        assert "instruction set" in lines[3]
    with pytest.raises(ValueError, match="does not fit a weight of 256 in-features"):
        kbit.explain((3, 255), q)
    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(256, 64))
    with pytest.raises(TypeError, match=r"got KbitLinear\. Pass its \.quantized\(\)\."):
        kbit.explain((3, 256), layer)
    assert kbit.explain((3, 256), layer.quantized()).splitlines() == lines
    monkeypatch.setenv("KBIT_BACKEND", "reference")
    assert kbit.explain((256,), q).splitlines()[-1] == "backend reference: taken"


@pytest.mark.parametrize(
    ("rows", "experts", "n", "k", "dtype", "arch", "kernel"),
    [
        (10, 512, 1024, 2048, torch.float16, "90a", "grouped"),
        (1024, 128, 512, 2048, torch.bfloat16, "90a", "grouped"),
        (1025, 128, 512, 2048, torch.float16, "90a", "wgmma"),
        (129, 8, 512, 2048, torch.float16, "90a", "wgmma"),  # few tiles, which clusters split
        (8, 8, 2048, 512, torch.float16, "90a", "resident"),
        (128, 8, 512, 2048, torch.bfloat16, "90a", "resident"),
        (64, 16, 512, 2048, torch.float16, "90a", "resident"),
        (64, 20, 512, 2048, torch.float16, "90a", "grouped"),  # more than blocks hold well
        (8, 8, 512, 2112, torch.float16, "90a", "grouped"),  # more columns than warps have registers for
        (8, 8, 512, 2048, torch.float16, "80", "grouped"),
        (2048, 128, 2048, 512, torch.float16, "90a", "wgmma"),
        (96 * 128, 128, 512, 2048, torch.float16, "80", "grouped"),
        (96 * 128 + 1, 128, 512, 2048, torch.float16, "80", "mma"),
        (10, 512, 1024, 2048, torch.float32, "90a", "cublas"),
        (10, 1025, 64, 64, torch.float16, "90a", "cublas"),
    ],
)
def test_who_takes_experts(rows, experts, n, k, dtype, arch, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    device = next(device for device in DEVICES if device.arch == arch)
    shape = (rows, dtype, experts, WeightShape(n, k, 4, False, device))
    assert grouped_preference.choose(*shape) == kernel
    words = grouped_preference.reasons(*shape)
    assert words[kernel].startswith("taken by estimate")
    monkeypatch.setenv("KBIT_KERNEL", "cublas")
    assert grouped_preference.choose(*shape) == "cublas"
    monkeypatch.setenv("KBIT_KERNEL", "stream")  # which is for one weight: experts are as they were
    assert grouped_preference.choose(*shape) == kernel


def test_explain_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBIT_BACKEND", raising=False)
    q = kbit.quantize(torch.randn(4, 64, 96), bits=4)
    words = kbit.explain((10, 96), q)
    assert words.startswith("10 tokens of 96 -> 64 in each of 4 experts, 4 bits, bfloat16")


def test_tiles_of_an_expert_are_an_expectation() -> None:
    assert wgmma_estimate.tiles_of_expert(2048, 128, 256) == pytest.approx(1)
    made = torch.Generator().manual_seed(0)
    for rows, tokens in ((24, 32), (32, 32), (64, 64), (100, 64), (128, 256), (200, 64)):
        ids = torch.randint(0, 512, (rows * 512,), generator=made)
        dealt = ids.bincount(minlength=512)
        tiles = float((-(-dealt // tokens)).double().mean())
        assert wgmma_estimate.tiles_of_expert(rows * 512, 512, tokens) == pytest.approx(tiles, rel=0.05)


@pytest.mark.parametrize(
    ("rows", "experts", "tokens", "teams"),
    [
        (16, 128, 16, 2),
        (20, 128, 32, 1),
        (32, 128, 48, 2),
        (64, 128, 80, 2),
        (80, 128, 96, 2),
        (112, 128, 128, 1),
        (128, 128, 144, 1),
        (160, 128, 192, 1),
        (512, 128, 256, 1),
        (64, 8, 64, 2),
    ],
)
def test_tiles_of_experts(rows: int, experts: int, tokens: int, teams: int) -> None:
    """With room for more rows than the average, but for few experts, which must fill the machine."""
    device = next(device for device in DEVICES if device.arch == "90a")
    plan = wgmma.grouped_plan(rows * experts, experts, WeightShape(2048, 768, 4, False, device))
    assert (plan.tiling.tokens, plan.teams) == (tokens, teams)


def test_kernels_are_compiled_for_any_codebook():
    shared = 227 * 1024
    found = {spec.name for spec in wgmma_config.specs()}
    found |= {spec.name for module in (grouped, resident) for spec in module.specs(shared)}
    for kernel in ("wgmma", "grouped", "resident"):
        assert any(name.startswith(f"{kernel}[bits=5") and "any_codebook=1" in name for name in found)
    assert not any("bits=4" in name and "any_codebook" in name for name in found)
