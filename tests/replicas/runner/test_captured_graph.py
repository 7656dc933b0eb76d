"""A graph goes before the group whose collectives it holds, in whatever order Python lets go of both."""

import contextlib
import gc
import weakref

import numpy as np
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


def made_group() -> np.ndarray:
    """Goes with the last reference alone, as torch's backends do: the garbage collector does not know it."""
    group = np.empty(0)
    assert not gc.is_tracked(group)
    weakref.finalize(group, ends.append, "group")
    return group


ends: list[str] = []


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    ends.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())


def test_it_does_again_what_the_body_did() -> None:
    made: list[int] = []
    graph = CapturedGraph(lambda: made.append(1), None, made_group())
    graph.replay()
    graph.replay()
    assert made == [1] and graph._graph.replays == 2


def test_the_graph_goes_first() -> None:
    group = made_group()
    graphs = [CapturedGraph(lambda: None, None, group) for _ in range(2)]
    del group
    del graphs
    assert ends == ["graph", "graph", "group"]


def test_the_graph_goes_first_out_of_a_cycle() -> None:
    holder = {"group": made_group()}
    holder["graphs"] = [CapturedGraph(lambda: None, None, holder["group"]) for _ in range(2)]
    holder["self"] = holder
    del holder
    gc.collect()
    assert ends == ["graph", "graph", "group"]
