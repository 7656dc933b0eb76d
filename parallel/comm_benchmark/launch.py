"""Starts the ranks as processes of this machine, and ends them when one of them fails."""

import multiprocessing
import os
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hybridserve.parallel.comm_benchmark.rank import open_store, run_rank
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings

_HOST = "127.0.0.1"
_END_S = 20.0
_DEATH_SHOWS_S = 0.5


@dataclass
class _Rank:
    number: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    report: dict[str, Any] | None = None


def choose_backend(backend: str) -> str:
    """`auto`: nccl where there is a GPU, else gloo."""
    if backend != "auto":
        return backend
    return "nccl" if torch.cuda.is_available() else "gloo"


def default_tp_size(backend: str) -> int:
    """As many as there are GPUs; two on a CPU."""
    return max(1, torch.cuda.device_count()) if backend == "nccl" else 2


def run_local(settings: BenchmarkSettings) -> dict[str, Any]:
    """The report of `settings.tp_size` processes of this machine, one a GPU with NCCL.

    Raises:
        ValueError: there are fewer GPUs than ranks, or a rank refused its settings.
        ChildProcessError: a rank failed or died; names it, with its traceback.
    """
    if settings.backend == "nccl" and torch.cuda.device_count() < settings.tp_size:
        raise ValueError(
            f"tp {settings.tp_size} with nccl needs as many GPUs, and this process sees "
            f"{torch.cuda.device_count()}; --backend gloo runs on the CPU"
        )
    # held here: a store that rank 0 owned would go away with it
    store, port = open_store(_HOST)
    # importing torch takes two seconds of a core: once for all ranks, not in each
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__])
    ranks = []
    try:
        for number in range(settings.tp_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(number, settings, port, sender), daemon=True)
            process.start()
            # only the rank holds its end now, so that its death is seen as the end of the pipe
            sender.close()
            ranks.append(_Rank(number, process, receiver))
        _collect(ranks)
        for rank in ranks:
            rank.process.join(_END_S)
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
        del store
    assert ranks[0].report is not None
    return ranks[0].report


def _run(rank: int, settings: BenchmarkSettings, port: int, pipe: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(("report", run_rank(rank, settings, _HOST, port)))
    except ValueError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))


def _end_with_parent() -> None:
    """A parent that was killed has no time to end its ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _collect(ranks: list[_Rank]) -> None:
    """Wait for every rank's report; the first that fails ends the waiting."""
    waiting = {rank.pipe: rank for rank in ranks}
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)
            try:
                kind, content = pipe.recv()
            except EOFError:
                raise _died(rank) from None
            if kind == "refused":
                raise ValueError(content)
            if kind == "failed":
                # a rank that died fails the others, and their news may come first
                for other in wait([r.process.sentinel for r in waiting.values()], _DEATH_SHOWS_S):
                    raise _died(next(r for r in waiting.values() if r.process.sentinel == other))
                raise ChildProcessError(f"rank {rank.number} failed:\n{content}")
            rank.report = content


def _died(rank: _Rank) -> ChildProcessError:
    rank.process.join()
    return ChildProcessError(f"rank {rank.number} died with exit status {rank.process.exitcode}")
