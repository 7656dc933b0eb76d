"""The communication benchmark as a Ray job: a rank in each bundle of a placement group.

Owns where ranks are placed and what is said when they cannot be. What a rank does is `parallel/`'s.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings

_PLACEMENT_TIMEOUT_S = 60.0


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connected to the cluster at `address` while it lasts, unless this process is connected already.

    Raises:
        ValueError: there is no cluster at `address`.
    """
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"ray_address {address!r}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


class BenchmarkRank:
    """One rank, an actor in a bundle of its own."""

    def open_store(self) -> tuple[str, int]:
        """Where the ranks meet: this node's address and a free port of it."""
        from hybridserve.parallel.comm_benchmark.rank import open_store

        host = ray.util.get_node_ip_address()
        self._store, port = open_store(host)
        return host, port

    def run(self, rank: int, settings: BenchmarkSettings, host: str, port: int) -> dict[str, Any]:
        from hybridserve.parallel.comm_benchmark.rank import run_rank

        # Ray shows an actor the GPU of its bundle alone
        report = run_rank(rank, settings, host, port, gpu=0)
        report["environment"]["node"] = ray.util.get_node_ip_address()
        return report


def run_on_cluster(
    settings: BenchmarkSettings, *, strategy: str = "PACK", placement_timeout_s: float = _PLACEMENT_TIMEOUT_S
) -> dict[str, Any]:
    """The report of `settings.tp_size` ranks on the connected cluster, each with a GPU (nccl) or CPU (gloo).

    As `run_local` gives it, and with every rank's node in `environment.nodes`.

    strategy: of the placement group; PACK puts ranks on as few nodes as it can, SPREAD on as many.

    Raises:
        ValueError: the cluster has no room for the ranks, or a rank refused its settings.
        ChildProcessError: a rank failed or died; says which.
    """
    bundle = {"CPU": 1.0, "GPU": 1.0} if settings.backend == "nccl" else {"CPU": 1.0}
    group = placement_group([bundle] * settings.tp_size, strategy=strategy)
    actors: list[Any] = []
    try:
        if not group.wait(placement_timeout_s):
            raise ValueError(
                f"tp {settings.tp_size} needs {settings.tp_size} bundles of {bundle}, and within "
                f"{placement_timeout_s:g} s the cluster had no room; it has {_resources()}, "
                f"free {_resources(free=True)}"
            )
        actors = [_start(settings, group, bundle, rank) for rank in range(settings.tp_size)]
        reports = _reports(actors, settings)
        nodes = [report["environment"].pop("node") for report in reports]
        reports[0]["environment"]["nodes"] = nodes
        return reports[0]
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _start(settings: BenchmarkSettings, group: PlacementGroup, bundle: dict[str, float], rank: int) -> Any:
    from hybridserve.parallel.group import FORCED_SWITCHES

    # what the user set here holds on the other nodes, too
    switches = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "GLOO_"))}
    return (
        ray.remote(BenchmarkRank)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            runtime_env={"env_vars": {**switches, **FORCED_SWITCHES}},
        )
        .remote()
    )


def _reports(actors: list[Any], settings: BenchmarkSettings) -> list[dict[str, Any]]:
    """Every rank's report; the first rank that fails ends the waiting, so that none waits for it forever."""
    rank_of: dict[Any, int] = {}
    try:
        host, port = ray.get(actors[0].open_store.remote())
    except RayError as error:
        raise ChildProcessError(f"rank 0 failed before it began: {error}") from error
    for rank, actor in enumerate(actors):
        rank_of[actor.run.remote(rank, settings, host, port)] = rank
    reports: dict[int, dict[str, Any]] = {}
    waiting = list(rank_of)
    while waiting:
        done, waiting = ray.wait(waiting)
        for result in done:
            rank = rank_of[result]
            try:
                reports[rank] = ray.get(result)
            except RayTaskError as error:
                if isinstance(error.cause, ValueError):
                    raise ValueError(str(error.cause)) from None
                raise ChildProcessError(f"rank {rank} failed:\n{error}") from None
            except RayActorError as error:
                raise ChildProcessError(f"rank {rank} died: {error}") from None
    return [reports[rank] for rank in range(len(actors))]


def _resources(*, free: bool = False) -> str:
    found = ray.available_resources() if free else ray.cluster_resources()
    return ", ".join(f"{found.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
