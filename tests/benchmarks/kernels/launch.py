"""An empty launch: what any kernel costs in a graph, and the baseline of latencies."""

import torch
import triton
from case import Calls, Case

from hybridserve.kernels.testing import Work


@triton.jit
def _empty_kernel(ptr):
    pass


def empty_launches() -> Calls:
    tensor = torch.zeros(1, device="cuda")
    return [lambda: _empty_kernel[(1,)](tensor)] * 2


def latency_goal(work: Work) -> float:
    """Microseconds that small work may take: an empty launch (1.6), a trip to memory, and the floor."""
    return 2.5 + work.floor_us()


def cases() -> list[Case]:
    return [
        Case(
            operator="empty launch",
            shape="1 program",
            work=Work(),
            calls=empty_launches,
            gate=lambda: None,
            warm=True,
        )
    ]
