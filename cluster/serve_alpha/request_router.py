"""Serve's request router for a pool: the replica with the fewest outstanding tokens.

Serve copies this module by value into every process that has a handle of the pool, so it has no state of its
own: that is in `PoolLoads`, which the ingress in the same process shares.
"""

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hybridserve.cluster.pool.interface import GenerationRequest
from hybridserve.cluster.routing.registry import pool_loads


# FIFOMixin: without it a request is matched by the id of the HTTP request it belongs to, and of several
# answers to one HTTP request all but one would wait for ever
class OutstandingTokensRouter(FIFOMixin, RequestRouter):
    """Made by Serve, once in each process for each pool."""

    def initialize_state(self, pool: str) -> None:
        """Called by Serve with what `router_config` says."""
        self._loads = pool_loads(self.app_name, pool)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come or go."""
        super().update_replicas(replicas)
        self._loads.set_replicas(replica.replica_id.unique_id for replica in replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._loads.set_replicas(one.unique_id for one in self.curr_replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best first, each a rank of its own."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        ranked = self._loads.choose(list(by_name), _request_id(pending_request))
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Called by Serve once the replica has accepted the request."""
        request_id = _request_id(pending_request)
        if request_id is not None:
            self._loads.routed(request_id, replica_id.unique_id)


def _request_id(pending: PendingRequest | None) -> str | None:
    """None for calls that are no request for tokens."""
    if pending is None or not pending.args or not isinstance(pending.args[0], GenerationRequest):
        return None
    return pending.args[0].request_id


def router_config(pool: str) -> RequestRouterConfig:
    """For the deployment of that pool."""
    return RequestRouterConfig(
        request_router_class=f"{__name__}.{OutstandingTokensRouter.__name__}",
        request_router_kwargs={"pool": pool},
    )
