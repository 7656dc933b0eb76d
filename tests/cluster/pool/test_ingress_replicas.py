"""Two ingress replicas in a real Serve, over an engine without a model: one scrape tells of both."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hybridserve.cluster.pool.replica import EngineActorOptions, PoolReplica
from hybridserve.cluster.settings_reading import parse_settings

pytestmark = pytest.mark.usefixtures("ray_instance")
ANSWERS = 30


@pytest.fixture
def url(fake_factory: Callable, demo_model: Path) -> Iterator[str]:
    """Of an application of one pool and two ingress replicas."""
    from ray import serve

    from hybridserve.cluster.ingress.deployment import build_ingress
    from hybridserve.cluster.serve_alpha.request_router import router_config

    settings = parse_settings({"model": {"path": str(demo_model)}, "ingress": {"num_replicas": 2}})
    [spec] = settings.pool_specs()
    pool = serve.deployment(
        PoolReplica,
        name="pool",
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=200,
        request_router_config=router_config(spec.name),
    ).bind(fake_factory(), EngineActorOptions(200, startup_timeout_s=60.0, num_cpus=0.1, pool=spec.name))
    serve.run(build_ingress(settings, {spec.name: pool}), name="two", route_prefix="/two")
    yield f"http://127.0.0.1:{_port()}/two"
    serve.delete("two")


def _port() -> int:
    from ray import serve

    [proxy] = serve.status().proxies.keys()
    assert proxy
    details = serve.context._get_global_client().get_serve_details()
    return details["http_options"]["port"]


def test_one_scrape_tells_of_both(url: str) -> None:
    async def ask_all() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            answers = await asyncio.gather(
                *(
                    client.post(f"{url}/v1/completions", json={"prompt": [index], "max_tokens": 2})
                    for index in range(ANSWERS)
                )
            )
            assert [answer.status_code for answer in answers] == [200] * ANSWERS, answers[0].text

    asyncio.run(ask_all())
    # a replica that has just started may not be known to the other yet
    deadline = time.monotonic() + 60
    while True:
        counts = answers_by_ingress(httpx.get(f"{url}/metrics", timeout=10).text)
        if len(counts) == 2 and sum(counts.values()) == ANSWERS:
            break
        assert time.monotonic() < deadline, counts
        time.sleep(0.2)
    # and so does every further one, whoever is asked
    for _ in range(6):
        assert answers_by_ingress(httpx.get(f"{url}/metrics", timeout=10).text) == counts


def answers_by_ingress(text: str) -> dict[str, float]:
    """Of each ingress replica that the scrape tells of."""
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "hybridserve_ingress_requests_in_flight":
                counts.setdefault(sample.labels["ingress"], 0.0)
            if sample.name == "hybridserve_requests_total":
                counts[sample.labels["ingress"]] = counts.get(sample.labels["ingress"], 0.0) + sample.value
    return counts
