"""A CUDA graph of what a rank does, collectives included."""

from collections.abc import Callable

import torch

from hybridserve.parallel.group import TensorParallelGroup


class CapturedGraph:
    """What a function launches, to be launched again.

    NCCL does not end a group's connections before every graph that holds collectives of it is gone, and waits
    for that without end; torch ends them with the last reference to the group. So a graph keeps its group,
    and goes first.
    """

    def __init__(self, body: Callable[[], None], pool: object, group: TensorParallelGroup) -> None:
        """Capture `body`, which must have run before: what a first call allocates for good must not lie in
        the graph's memory. Let all run before the first is captured: a capture waits for NCCL's watchdog to
        have seen the end of what was sent before, which it looks for ten times a second.
        """
        self._graph = torch.cuda.CUDAGraph()
        self._group = group
        # other threads, NCCL's watchdog among them, may go on using the device
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            body()

    def replay(self) -> None:
        self._graph.replay()

    def __del__(self) -> None:
        # before any attribute goes, also where garbage is collected, which goes in any order
        self._graph.reset()
