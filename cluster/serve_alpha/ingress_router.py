"""Serve's request router for the ingress, in each of Serve's proxies: the replica with the fewest of its own.

Serve's own asks two replicas how many requests they have. What it does not know it asks for while it goes on,
and a burst that comes after ten quiet seconds went to the one replica whose answer was there first. Here a
proxy counts what it sent itself, which is known at once. Serve copies this module by value, so all state is
in the instance.
"""

import random
from collections import Counter

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from hybridserve.cluster.serve_alpha.proxy_mode import ProxyMode


class OwnRequestsRouter(FIFOMixin, RequestRouter):
    """Made by Serve, once in each proxy."""

    def initialize_state(self) -> None:
        """Called by Serve before anything else."""
        self._sent: Counter[ReplicaID] = Counter()
        self._chosen: Counter[ReplicaID] = Counter()
        """And not sent yet: Serve chooses for many requests before it sends the first one."""
        self._doubtful: set[ReplicaID] = set()
        """Did not answer when they were last sent something."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas come or go."""
        super().update_replicas(replicas)
        for gone in self._sent.keys() - {replica.replica_id for replica in replicas}:
            del self._sent[gone]
            self._doubtful.discard(gone)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best first, each a rank of its own; Serve asks doubtful ones meanwhile."""
        if self.num_pending_requests <= 1:
            # one that was chosen and turned out to be full stays here
            self._chosen.clear()
        cache = self.replica_queue_len_cache
        sure: list[RunningReplica] = []
        doubtful: list[RunningReplica] = []
        for replica in candidate_replicas:
            name = replica.replica_id
            if cache.get(name) is not None:
                self._doubtful.discard(name)
            elif name not in self._doubtful:
                # or Serve would wait until the replica has told
                cache.update(name, self._sent[name])
            (doubtful if name in self._doubtful else sure).append(replica)
        if not sure:
            return [doubtful]
        sure.sort(
            key=lambda one: (self._sent[one.replica_id] + self._chosen[one.replica_id], random.random())
        )
        self._chosen[sure[0].replica_id] += 1
        return [[sure[0], *doubtful], *([replica] for replica in sure[1:])]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Serve when it sends a request."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1
        if self._chosen[replica_id]:
            self._chosen[replica_id] -= 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request that was sent has ended, however it did."""
        if self._sent[replica_id]:
            self._sent[replica_id] -= 1

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Called by Serve when a request could not be sent."""
        super().on_replica_actor_unavailable(replica_id)
        self._doubtful.add(replica_id)


def ingress_options(proxy: ProxyMode) -> dict[str, object]:
    """Options of the ingress' deployment behind that proxy; HAProxy chooses by itself, and Serve says so."""
    if proxy == "haproxy":
        return {}
    name = f"{__name__}.{OwnRequestsRouter.__name__}"
    return {"request_router_config": RequestRouterConfig(request_router_class=name)}
