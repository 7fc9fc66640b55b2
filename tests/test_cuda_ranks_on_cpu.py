"""one_shot.cu, run on the CPU as one of several ranks, whose parts are there already."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends.cuda import ranks
from parallel_ranks import sum_of

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

CAPACITY = 4096  # pieces
LAST = 2**32 - 1  # number of a sum


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_ranks_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


def signed(number: int) -> int:
    return number - 2**32 if number >= 2**31 else number


def pieces_of(x: torch.Tensor, number: int) -> torch.Tensor:
    """int32 [lines, 4]: what a rank sends of its part."""
    lines = x.flatten().view(torch.int32).view(-1, 2)
    numbers = torch.full((len(lines),), signed(number), dtype=torch.int32)
    return torch.stack([lines[:, 0], numbers, lines[:, 1], numbers], dim=1)


class Machine:
    """The inboxes of ranks, as rank `rank` finds them when the parts of all others have come."""

    def __init__(self, parts: list[torch.Tensor], rank: int, number: int) -> None:
        self.parts, self.rank, self.number = parts, rank, number
        self.memory = [
            guarded(torch.zeros(2, len(parts), CAPACITY, 4, dtype=torch.int32)) for _ in range(len(parts))
        ]
        for other, part in enumerate(parts):
            if other != rank:
                sent = pieces_of(part, number)
                self.memory[rank][number % 2, other, : len(sent)] = sent
        self.state = torch.tensor([signed(number), 0, 0], dtype=torch.int32)
        addresses = [one.data_ptr() for one in self.memory]
        self.inboxes = ranks.Inboxes(addresses, self.state, rank, CAPACITY, 600)

    def check(self) -> None:
        """This rank's part went to all, nothing else anywhere, and the next number is there."""
        sent = pieces_of(self.parts[self.rank], self.number)
        for memory in self.memory:
            assert untouched(memory)
            assert torch.equal(memory[self.number % 2, self.rank, : len(sent)], sent)
            assert not memory[self.number % 2, self.rank, len(sent) :].any()
            assert not memory[1 - self.number % 2].any()
        following = 2 if self.number == LAST else self.number + 1
        assert self.state.tolist() == [signed(following), 0, 0]

    def lose(self, other: int) -> None:
        """Another rank's part has not come."""
        self.memory[self.rank][self.number % 2, other].zero_()


@pytest.mark.parametrize("number", [1, 2, 2**31, LAST])
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums(dtype, count, number):
    for size, rank in ((4, 0), (12, count - 1), (2048, 1), (4 * CAPACITY, 0)):
        machine = Machine([torch.randn(size).to(dtype) for _ in range(count)], rank, number)
        x = guarded(machine.parts[rank].clone())
        out = guarded(torch.full((size,), float("nan"), dtype=dtype))
        ranks.one_shot(x, machine.inboxes, out, gathers=False)
        assert untouched(out)
        assert torch.equal(out, sum_of(machine.parts))
        machine.check()


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize(("rows", "columns"), [(1, 4), (3, 20), (5, 1024)])
def test_columns_side_by_side(count, rows, columns):
    for rank in range(count):
        machine = Machine([torch.randn(rows, columns).half() for _ in range(count)], rank, 7)
        out = guarded(torch.full((rows, count * columns), float("nan")).half())
        ranks.one_shot(machine.parts[rank], machine.inboxes, out, gathers=True)
        assert untouched(out)
        assert torch.equal(out, torch.cat(machine.parts, dim=1))
        machine.check()


@pytest.mark.parametrize("count", [2, 8])
def test_a_rank_that_does_not_come_is_given_up(count):
    machine = Machine([torch.randn(520).half() for _ in range(count)], 0, 3)
    machine.lose(count - 1)
    out = guarded(torch.zeros(520).half())
    ranks.one_shot(machine.parts[0], machine.inboxes._replace(seconds=-3), out, gathers=False)
    assert untouched(out)
    assert machine.state.tolist() == [4, 0, 1]
