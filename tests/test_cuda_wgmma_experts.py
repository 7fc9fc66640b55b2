"""csrc/wgmma.cu for experts on a GPU: every launch, any dealing of rows, the same bits on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import kbit
from kbit.backends.cuda import driver, wgmma, wgmma_config
from kbit.format import SUPPORTED_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"
    ),
]
N, K = 352, 712  # three blocks of rows, the last in part; 12 tiles of columns, the last in part
# Empty experts first, last and between; one with all rows; rows that fill tiles, and one more.
DEALINGS = [
    (0, 3, 0, 0, 70, 16, 0),
    (0, 0, 150),
    (64, 65, 32, 33, 16, 17),
    (48, 49, 81, 97, 0, 112, 113, 145, 193, 257),
    (1,) * 300,
    (2, 0, 1) * 30,
]


def launches(bits: int, gated: bool) -> Iterator[wgmma.Plan]:
    """Every block for experts, by itself and in clusters; as many blocks as do and do not suffice."""
    for block in wgmma_config.grouped_blocks(bits, gated):
        for cluster in driver.CLUSTER_SHARES:
            if cluster == 1 or block.splits(K, cluster):
                for clusters in (2, 16):
                    yield wgmma.Plan(block.tiling(cluster), clusters * cluster, block.teams)


class Problem:
    """Rows dealt to experts."""

    def __init__(self, dealing: Sequence[int], bits: int, dtype: torch.dtype, gated: bool = False) -> None:
        self.dealing, self.gated, self.rows = dealing, gated, sum(dealing)
        self.offsets = torch.tensor([0, *dealing], device="cuda").cumsum(0).int()
        self.q = kbit.quantize(torch.randn(len(dealing), N, K, device="cuda"), bits, search=False).tile()
        self.x = torch.randn(self.rows, K, device="cuda").to(dtype)

    def run(self, plan: wgmma.Plan) -> torch.Tensor:
        """A launch into a poisoned result."""
        width = N // 2 if self.gated else N
        out = torch.full((self.rows, width), torch.nan, device="cuda", dtype=self.x.dtype)
        weight = (self.q.tiled, self.q.codebook, self.q.scale, self.offsets, N, K, self.gated)
        wgmma.grouped_linear(self.x, *weight, out, plan)
        return out

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 products, and how far float32 sums of K products, rounded once, may be from them."""
        experts = torch.arange(len(self.dealing), device="cuda")
        of_row = experts.repeat_interleave(torch.tensor(self.dealing, device="cuda"))
        w = kbit.dequantize(self.q, self.x.dtype).double()
        x = self.x.double()
        exact = torch.cat([x[of_row == e] @ w[e].T for e in range(len(self.dealing))])
        size = torch.cat([x[of_row == e].abs() @ w[e].abs().T for e in range(len(self.dealing))])
        return exact, torch.finfo(self.x.dtype).eps * exact.abs() + (K + 1) * 2.0**-23 * size


@pytest.mark.parametrize("dealing", DEALINGS, ids=lambda dealing: f"{len(dealing)} of {sum(dealing)}")
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_launch(bits: int, dealing: Sequence[int]) -> None:
    problem = Problem(dealing, bits, torch.bfloat16 if bits % 2 else torch.float16)
    exact, bound = problem.expected()
    of_one_block: list[torch.Tensor] = []
    for plan in launches(bits, gated=False):
        y = problem.run(plan)
        assert bool(((y.double() - exact).abs() <= bound).all()), plan
        if plan.tiling.cluster == 1 and plan.tiling.rows == wgmma_config.ROWS:
            of_one_block.append(y)
    assert all(torch.equal(y, of_one_block[0]) for y in of_one_block), "sums have the order of the columns"


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_launch_of_gated_weights(bits: int) -> None:
    problem = Problem(DEALINGS[0], bits, torch.float16, gated=True)
    gates, ups = problem.expected()[0].half().double().chunk(2, dim=1)
    activated = torch.nn.functional.silu(gates).half().double() * ups
    for plan in launches(bits, gated=True):
        y = problem.run(plan).double()
        torch.testing.assert_close(y, activated, rtol=0.05, atol=0.05 * float(activated.abs().mean()))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_repeated_runs_are_bit_identical_on_a_busy_gpu(bits: int) -> None:
    noise, busy = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    problem = Problem(DEALINGS[2], bits, torch.float16)
    for plan in launches(bits, gated=False):
        first = problem.run(plan)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for _ in range(200):
            with torch.cuda.stream(busy):
                torch.mm(noise, noise)
            differing += (problem.run(plan).view(torch.int16) != first.view(torch.int16)).sum()
        assert int(differing) == 0, plan
