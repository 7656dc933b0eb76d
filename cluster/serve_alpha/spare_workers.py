"""Spare worker processes: a few on each node that have loaded all that a replica's processes need, and wait.

Ray gives a new actor to an idle worker process where its node has one that was never used. It starts such
processes when its raylet is told to, by a call that is no part of its public API; `preloaded` is what they
do first. Where the call does not work a replica's processes start as they would without.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc, runtime_environment_pb2
from ray.exceptions import RayError

from hybridserve.cluster.serve_alpha.preloaded import NOBODYS_JOB

# not at once: what has just been started, on this node or beside it, has better uses for the cores
_PERIOD_S = 10.0
# a worker is not counted before it has started, which on busy cores takes its time
_PATIENCE_S = 30.0
_CALL_S = 5.0
# then Ray may end it, where there are more idle workers than CPUs that are free, and it is asked for anew
_KEPT_S = 24 * 3600

logger = logging.getLogger(__name__)


class NoSuchCallError(RuntimeError):
    """This Ray's raylets start no processes for nobody."""


@dataclass(frozen=True)
class SpareWorkersOptions:
    """How many spare processes there are to be, and where."""

    per_node: int
    cpus: float
    gpus: float
    """Of one replica: what a node has to have in all to be given spare processes."""


@dataclass(frozen=True)
class Raylet:
    """A node's, and where it listens."""

    node_id: str
    address: str


class SpareWorkers:
    """Asks the raylets of all nodes that could hold a replica for what is missing of the spare processes.

    Several at once may ask for more than there are to be, so only one of a pool's replicas does at a time.

    Args:
        options: what there is to be.
        in_charge: whether it is this one that asks. The replica that did may have ended.
    """

    def __init__(self, options: SpareWorkersOptions, in_charge: Callable[[], bool] = lambda: True) -> None:
        self._options = options
        self._in_charge = in_charge
        self._asked: dict[str, tuple[float, int]] = {}
        """When each node was asked last, and how many it had then."""
        runtime_env = ray.get_runtime_context().get_runtime_env_string()
        # an actor is only given to a process with the environment that it is to have itself
        self._runtime_env = runtime_environment_pb2.RuntimeEnvInfo(serialized_runtime_env=runtime_env)

    async def keep(self) -> None:
        """Go on until cancelled, or until it turns out that this Ray has no such calls."""
        while True:
            await asyncio.sleep(_PERIOD_S * random.uniform(0.7, 1.3))
            if not self._in_charge():
                continue
            try:
                await asyncio.to_thread(self.fill)
            except NoSuchCallError as error:
                logger.warning("there will be no spare processes: %s", error)
                return
            except RayError as error:
                logger.warning("the nodes are not known, so none gets spare processes: %s", error)

    def fill(self) -> None:
        """Ask for what is missing now.

        Raises:
            NoSuchCallError: the raylets have no such calls.
            RayError: the nodes are not known.
        """
        for raylet in raylets(ray.nodes(), self._options):
            try:
                self._fill(raylet)
            except grpc.RpcError as error:
                # a node that has just gone, most likely
                logger.info("node %s was not asked for spare processes: %s", raylet.node_id, error.code())
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise NoSuchCallError(f"Ray {ray.__version__} cannot start them") from error

    def _fill(self, raylet: Raylet) -> None:
        count = len(spare_processes(raylet.address))
        now = time.monotonic()
        asked_at, count_then = self._asked.get(raylet.node_id, (-_PATIENCE_S, 0))
        # those that were asked for have come, or some: a raylet starts no more at once than there are cores
        if count < self._options.per_node and (count > count_then or now >= asked_at + _PATIENCE_S):
            self._asked[raylet.node_id] = now, count
            self._ask(raylet.address, self._options.per_node - count)

    def _ask(self, address: str, count: int) -> None:
        request = node_manager_pb2.PrestartWorkersRequest(
            language=common_pb2.PYTHON,
            num_workers=count,
            keep_alive_duration_secs=_KEPT_S,
            runtime_env_info=self._runtime_env,
        )
        with init_grpc_channel(address) as channel:
            stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
            stub.PrestartWorkers(request, timeout=_CALL_S)


def spare_processes(address: str) -> list[int]:
    """The pids of a node's workers that have never been used, those still loading among them.

    Args:
        address: of its raylet.

    Raises:
        grpc.RpcError: it could not be asked.
    """
    with init_grpc_channel(address) as channel:
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        answer = stub.GetNodeStats(node_manager_pb2.GetNodeStatsRequest(), timeout=_CALL_S)
    workers = (one for one in answer.core_workers_stats if one.worker_type == common_pb2.WORKER)
    return [one.pid for one in workers if one.job_id.hex() == NOBODYS_JOB]


def raylets(nodes: Iterable[Mapping[str, Any]], options: SpareWorkersOptions) -> list[Raylet]:
    """Of the living nodes that have what a replica takes, be it in use or not."""
    return [
        Raylet(node["NodeID"], f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        for node in nodes
        if node["Alive"]
        and node["Resources"].get("CPU", 0.0) >= options.cpus
        and node["Resources"].get("GPU", 0.0) >= options.gpus
    ]
