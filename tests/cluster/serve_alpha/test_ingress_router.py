"""How one of Serve's proxies shares out its requests, without a Serve around it."""

from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from hybridserve.cluster.serve_alpha.ingress_router import OwnRequestsRouter, ingress_options

pytestmark = pytest.mark.anyio

DEPLOYMENT = DeploymentID("ingress", "app")


def replica(name: str) -> SimpleNamespace:
    return SimpleNamespace(replica_id=ReplicaID(name, DEPLOYMENT), max_ongoing_requests=100)


@pytest.fixture
def replicas() -> list[SimpleNamespace]:
    return [replica(name) for name in "abc"]


@pytest.fixture
def router() -> OwnRequestsRouter:
    made = OwnRequestsRouter(DEPLOYMENT, DeploymentHandleSource.PROXY, use_replica_queue_len_cache=True)
    made.initialize_state()
    # Serve keeps those that wait to be sent in here
    made._pending_requests_to_fulfill.extend([None, None])
    return made


async def test_requests_are_shared_alike_whether_sent_at_once_or_later(router, replicas) -> None:
    for send_at_once in (True, False):
        firsts = []
        for _ in range(30):
            ranks = await router.choose_replicas(replicas)
            assert sorted(one.replica_id.unique_id for [one] in ranks) == ["a", "b", "c"]
            firsts.append(ranks[0][0].replica_id)
            if send_at_once:
                router.on_send_request(firsts[-1])
        if not send_at_once:
            for name in firsts:
                router.on_send_request(name)
        assert set(Counter(firsts).values()) == {10}
    # who has been relieved of requests is next
    for _ in range(5):
        router.on_request_completed(replicas[1].replica_id, "any")
    following = [(await router.choose_replicas(replicas))[0][0] for _ in range(5)]
    assert following == [replicas[1]] * 5


async def test_a_choice_that_came_to_nothing_is_forgotten(router, replicas) -> None:
    for _ in range(9):
        await router.choose_replicas(replicas)
    router._pending_requests_to_fulfill.clear()
    router.on_send_request(replicas[0].replica_id)
    first = (await router.choose_replicas(replicas))[0][0]
    assert first is not replicas[0]


async def test_one_that_did_not_answer_is_asked_and_not_chosen_until_it_does(router, replicas) -> None:
    silent = replicas[0].replica_id
    for one in replicas[1:]:
        router.on_send_request(one.replica_id)
    router.on_replica_actor_unavailable(silent)
    for _ in range(4):
        ranks = await router.choose_replicas(replicas)
        assert ranks[0][0].replica_id != silent and ranks[0][1].replica_id == silent
        assert len(ranks) == 2
    assert await router.choose_replicas(replicas[:1]) == [replicas[:1]]
    router.replica_queue_len_cache.update(silent, 0)
    router._pending_requests_to_fulfill.clear()
    assert (await router.choose_replicas(replicas))[0] == [replicas[0]]


def test_behind_haproxy_which_chooses_itself_serve_takes_no_router() -> None:
    assert ingress_options("haproxy") == {}
    config = ingress_options("serve")["request_router_config"]
    assert config.get_request_router_class().__name__ == "OwnRequestsRouter"
