"""Engines of several ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.engine import Engine

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(demo_model: Path) -> Iterator[Make]:
    """`make(size, extents=…, **options)`: an engine of the demo model, rank 0's arena full of NaN."""
    threads = torch.get_num_threads()
    engines: list[Engine] = []

    def build(size: int, extents: int = 64, **options: object) -> Engine:
        config = EngineConfig(
            str(demo_model),
            device="cpu",
            tensor_parallel_size=size,
            cache_memory_bytes=extents * (1_050_000 if size == 1 else 525_000),
            **options,
        )
        engine = build_engine(config)
        engines.append(engine)
        runner = engine._executor if size == 1 else engine._executor.runner
        runner._storage.buffer.fill_(0xFF)
        return engine

    yield build
    for engine in engines:
        engine.shutdown()
    torch.set_num_threads(threads)
