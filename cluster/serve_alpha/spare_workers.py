"""Spare worker processes: a few on each node that have loaded all that a replica's processes need, and wait.

Ray gives a new actor to an idle worker process where its node has one that was never used. It starts such
processes when its raylet is told to, by a call that is no part of its public API; `preloaded` is what they
do first. Where the call does not work a replica's processes start as they would without.
"""

import asyncio
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc, runtime_environment_pb2

from hybridserve.cluster.serve_alpha.preloaded import NOBODYS_JOB

# not at once: what has just been started, on this node or beside it, has better uses for the cores
_PERIOD_S = 10.0
# a worker is not counted before it has started, which on busy cores takes its time
_PATIENCE_S = 30.0
_CALL_S = 5.0
# then Ray may end it, where there are more idle workers than CPUs that are free, and it is asked for anew
_KEPT_S = 24 * 3600

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpareWorkersOptions:
    """How many spare processes there are to be, and where."""

    per_node: int
    cpus: float
    gpus: float
    """Of one replica: what a node has to have in all to be given spare processes."""


@dataclass(frozen=True)
class _Raylet:
    node_id: str
    address: str


class SpareWorkers:
    """Asks the raylets of all nodes that could hold a replica for what is missing of the spare processes.

    Several of these at once may ask for more than there are to be: one replica of a pool has one.
    """

    def __init__(self, options: SpareWorkersOptions) -> None:
        self._options = options
        self._asked: dict[str, float] = {}
        """When each node was asked last."""
        runtime_env = ray.get_runtime_context().get_runtime_env_string()
        # an actor is only given to a process with the environment that it is to have itself
        self._runtime_env = runtime_environment_pb2.RuntimeEnvInfo(serialized_runtime_env=runtime_env)

    async def keep(self) -> None:
        """Go on until cancelled, or until it turns out that this Ray has no such calls."""
        while True:
            await asyncio.sleep(_PERIOD_S * random.uniform(0.7, 1.3))
            try:
                await asyncio.to_thread(self.fill)
            except grpc.RpcError as error:
                logger.warning("no spare processes: %s", error.code())
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    return

    def fill(self) -> None:
        """Ask for what is missing now.

        Raises:
            grpc.RpcError: of a raylet that could not be asked.
        """
        for raylet in _raylets(ray.nodes(), self._options):
            now = time.monotonic()
            if now < self._asked.get(raylet.node_id, -_PATIENCE_S) + _PATIENCE_S:
                continue
            with init_grpc_channel(raylet.address) as channel:
                stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
                missing = self._options.per_node - _count(stub)
                if missing > 0:
                    self._asked[raylet.node_id] = now
                    stub.PrestartWorkers(
                        node_manager_pb2.PrestartWorkersRequest(
                            language=common_pb2.PYTHON,
                            num_workers=missing,
                            keep_alive_duration_secs=_KEPT_S,
                            runtime_env_info=self._runtime_env,
                        ),
                        timeout=_CALL_S,
                    )


def _raylets(nodes: Iterable[Mapping[str, object]], options: SpareWorkersOptions) -> list[_Raylet]:
    """Of the living nodes that have what a replica takes, be it in use or not."""
    return [
        _Raylet(node["NodeID"], f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        for node in nodes
        if node["Alive"]
        and node["Resources"].get("CPU", 0.0) >= options.cpus
        and node["Resources"].get("GPU", 0.0) >= options.gpus
    ]


def _count(stub: node_manager_pb2_grpc.NodeManagerServiceStub) -> int:
    """A node's workers that have never been used."""
    stats = stub.GetNodeStats(node_manager_pb2.GetNodeStatsRequest(), timeout=_CALL_S).core_workers_stats
    return sum(one.worker_type == common_pb2.WORKER and one.job_id.hex() == NOBODYS_JOB for one in stats)
