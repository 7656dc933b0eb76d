"""What every rank of the benchmark runs, wherever and by whomever it was started."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridserve.parallel.comm_benchmark.environment import describe_environment
from hybridserve.parallel.comm_benchmark.formulas import rank_counts
from hybridserve.parallel.comm_benchmark.implementations import not_measured
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings
from hybridserve.parallel.comm_benchmark.shares import shares
from hybridserve.parallel.comm_benchmark.sweep import sweep
from hybridserve.parallel.group import connect, force_switches

SCHEMA_VERSION = 1
# ranks outside a smaller group wait for it this long
_LONGEST_RUN = timedelta(hours=6)


def open_store(host: str) -> tuple[dist.Store, int]:
    """A store on `host`, an address of this machine, and the free port it took."""
    store = dist.TCPStore(host, 0, None, True, wait_for_workers=False)
    return store, store.port


def run_rank(
    rank: int, settings: BenchmarkSettings, host: str, port: int, gpu: int | None = None
) -> dict[str, Any]:
    """Take part in the whole benchmark as `rank`; the store is at `host`:`port`.

    The strategies run on groups of the first 1, 2, 4 … ranks, the collectives on all. `gpu`: with NCCL the
    index of the device, by default the rank.
    Returns the report as on this rank; rank 0's is the one to keep.

    Raises:
        ValueError: this process does not see the GPU it should use.
        ArithmeticError: a collective or a strategy gave a wrong result.
    """
    force_switches(os.environ)
    device = _take_device(settings, rank if gpu is None else gpu)
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=settings.timeout_s))
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": settings.as_json(),
        "environment": describe_environment(settings.backend, device),
        "not_measured": {},
        "collectives": [],
        "strategies": [],
    }
    with torch.inference_mode():
        for count in rank_counts(settings.tp_size):
            if rank < count:
                group = connect(
                    rank,
                    count,
                    dist.PrefixStore(f"ranks/{count}", store),
                    backend=settings.backend,
                    timeout_s=settings.timeout_s,
                    overlapped_bytes=settings.overlapped_bytes,
                )
                report["strategies"] += shares(settings, group, device)
                if count == settings.tp_size:
                    report["not_measured"] = not_measured(group, settings.backend)
                    report["collectives"] = sweep(settings, group, device)
            _wait_for_all(store, f"done/{count}", settings.tp_size)
    return report


def _take_device(settings: BenchmarkSettings, gpu: int) -> torch.device:
    if settings.backend == "gloo":
        # ranks that share cores and each use them all wait for each other's threads
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // settings.tp_size))
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if gpu >= count:
        raise ValueError(
            f"backend nccl: rank {gpu} needs GPU {gpu}, and this process sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')})"
        )
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)


def _wait_for_all(store: dist.Store, key: str, count: int) -> None:
    """Until `count` ranks have come here; waits on the socket and takes no time from those that measure."""
    if store.add(f"{key}/arrived", 1) == count:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], _LONGEST_RUN)
