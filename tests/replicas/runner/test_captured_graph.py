"""A graph goes before the group whose collectives it holds, in whatever order Python lets go of both."""

import contextlib
import gc

import pytest
import torch

from hybridserve.replicas.runner.captured_graph import CapturedGraph


class Graph:
    """In place of CUDA's."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1

    def reset(self) -> None:
        ends.append("graph")


class Group:
    """Goes with the last reference alone, as torch's backends do: no garbage collector knows it."""

    __slots__ = ()

    def __del__(self) -> None:
        ends.append("group")


ends: list[str] = []


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    ends.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())


def test_it_does_again_what_the_body_did() -> None:
    made: list[int] = []
    graph = CapturedGraph(lambda: made.append(1), None, Group())
    graph.replay()
    graph.replay()
    assert made == [1] and graph._graph.replays == 2


def test_the_graph_goes_first() -> None:
    group = Group()
    graphs = [CapturedGraph(lambda: None, None, group) for _ in range(2)]
    del group
    del graphs
    assert ends == ["graph", "graph", "group"]


def test_the_graph_goes_first_out_of_a_cycle() -> None:
    assert not gc.is_tracked(Group())
    ends.clear()
    holder = {"group": Group()}
    holder["graphs"] = [CapturedGraph(lambda: None, None, holder["group"]) for _ in range(2)]
    holder["self"] = holder
    del holder
    gc.collect()
    assert ends == ["graph", "graph", "group"]
