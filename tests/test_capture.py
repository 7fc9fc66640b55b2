"""Captures of CUDA graphs: no garbage is collected meanwhile, and one that fails leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from kbit.backends.cuda.capture import _garbage_stays, capture
from kbit.integrations.transformers.recordings import SharedPool, record_cuda_graph


class InACycle:
    """What only the garbage collector finds."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


@pytest.fixture
def collector() -> Iterator[None]:
    """The garbage collector as it was, afterwards."""
    before = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*before[1])
    (gc.enable if before[0] else gc.disable)()


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_rests_and_is_left_as_it_was(collects, collector):
    (gc.enable if collects else gc.disable)()

    def fail() -> None:
        with _garbage_stays():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled() is collects


def doubled(x: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with capture(graph, x.device):
        x.mul_(2)
    return graph


@pytest.mark.gpu
def test_a_graph_in_garbage_stays_until_the_capture_ends(collector, monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "force_cudagraph_gc", False)
    x = torch.ones(4, device="cuda")
    gc.set_threshold(1)
    graph, old = torch.cuda.CUDAGraph(), [doubled(x)]
    with capture(graph):
        InACycle(old.pop())
        _ = [[] for _ in range(1000)]  # the collector runs when lists are made
        x.mul_(2)
    graph.replay()
    assert x.tolist() == [2.0] * 4


def wait_for(x: torch.Tensor) -> None:
    x.sum().item()


def refuse(x: torch.Tensor) -> None:
    raise RuntimeError("of the body")


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("body", "says"), [(wait_for, "CUDA error"), (refuse, "of the body")])
def test_a_recording_that_failed_leaves_nothing(body, says, shared):
    x = torch.ones(4, device="cuda")
    record = SharedPool() if shared else record_cuda_graph

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def fail() -> dict[str, torch.Tensor]:
        large = torch.empty(2**26, device="cuda").fill_(1)
        body(x)
        return {"large": large}

    replay, _ = record(lambda: {"x": x.mul_(2)}, x.device)
    replay()
    before = reserved()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=says):
            record(fail, x.device)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").max() <= 1
    again, _ = record(lambda: {"x": x.mul_(3)}, x.device)
    again()
    replay()
    assert x.tolist() == [12.0] * 4
    del replay, again  # a pool keeps its memory for the graphs in it
    assert reserved() - before < 2**26


@pytest.mark.gpu
def test_random_numbers_of_a_graph_go_on():
    graph, numbers = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with capture(graph, torch.device("cuda")):
        numbers.copy_(torch.rand(4, device="cuda"))
    graph.replay()
    first = numbers.clone()
    graph.replay()
    assert not torch.equal(first, numbers)
