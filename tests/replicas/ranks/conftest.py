"""Engines of several ranks, and what is left of them."""

import os
import time
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


def rank_processes(parent: int | None = None) -> list[int]:
    """The ids of running processes of ranks that `parent`, by default this process, has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_running(int(entry.name)):
            status, command = (_text(entry / name) for name in ("stat", "cmdline"))
            if "rank_main" in command and int(status.rpartition(")")[2].split()[1]) == (parent or os.getpid()):
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has asked about yet (a zombie) is not."""
    state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def channel_files() -> int:
    """How many descriptors of step channels this process holds."""
    links = (_link(entry) for entry in Path("/proc/self/fd").iterdir())
    return sum("hybridserve-step-channel" in link for link in links)


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
