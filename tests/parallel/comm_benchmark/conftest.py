"""A small layer, and ranks that are threads of this process."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings, Case, LayerShape
from hybridserve.parallel.layers.sums import Summand
from hybridserve.parallel.peer_sums import Norm


class Summed(NamedTuple):
    total: torch.Tensor

    def end(self, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        return self.total, norm(self.total)


class ThreadWire:
    """A rank's end of collectives between threads, which also counts the bytes of messages by label."""

    def __init__(self, rank: int, slots: list[torch.Tensor | None], barrier: threading.Barrier) -> None:
        self.rank, self.slots, self.barrier = rank, slots, barrier
        self.sent: dict[str, int] = {}

    def all_reduce(self, x: torch.Tensor, label: str) -> torch.Tensor:
        self._count(label, x)
        return x.copy_(sum(self._exchange(x)))

    def sum_and_norm(
        self, part: Summand, residual: torch.Tensor, norm: Norm, label: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.begin_sum(part, residual, label).end(norm)

    def begin_sum(self, part: Summand, residual: torch.Tensor, label: str) -> "Summed":
        return Summed(self.all_reduce(part(residual if self.rank == 0 else None), label))

    def all_gather_into(self, out: torch.Tensor, x: torch.Tensor, label: str) -> None:
        self._count(label, out)
        torch.cat([part.flatten() for part in self._exchange(x)], out=out.view(-1))

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.slots[self.rank] = x.clone()
        self.barrier.wait()
        parts = [part for part in self.slots if part is not None]
        self.barrier.wait()
        return parts

    def _count(self, label: str, message: torch.Tensor) -> None:
        self.sent[label] = self.sent.get(label, 0) + message.numel() * message.element_size()


@pytest.fixture
def on_threads() -> Callable[..., list[Any]]:
    """Runs `program(rank, wire)` on `size` threads and returns their results."""

    def run(size: int, program: Callable[[int, ThreadWire], Any]) -> list[Any]:
        slots: list[torch.Tensor | None] = [None] * size
        barrier = threading.Barrier(size, timeout=60)
        results: list[Any] = [None] * size
        failures: list[BaseException] = []

        def of(rank: int) -> None:
            try:
                with torch.inference_mode():
                    results[rank] = program(rank, ThreadWire(rank, slots, barrier))
            except BaseException as error:
                failures.append(error)
                barrier.abort()

        threads = [threading.Thread(target=of, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    return run


SHAPE = LayerShape("tiny", hidden_size=32, num_k_heads=4, num_v_heads=8, head_k_dim=8, head_v_dim=16)


@pytest.fixture
def shape() -> LayerShape:
    return SHAPE


@pytest.fixture(scope="session")
def tiny_settings() -> Callable[..., BenchmarkSettings]:
    """Settings of a run that takes no time of its own."""

    def make(tp_size: int, **changes: Any) -> BenchmarkSettings:
        given: dict[str, Any] = {
            "layer": SHAPE,
            "dtype": "float32",
            "backend": "gloo",
            "tp_size": tp_size,
            "sizes": (1024, 4096),
            "cases": (Case("decode", 3), Case("prefill", 70)),
            "max_bytes": 16384,
            "min_replays": 3,
            "max_replays": 3,
            "timeout_s": 60.0,
        }
        return BenchmarkSettings(**{**given, **changes})

    return make
