"""`configs/demo-pools.yaml` on a real server: who goes where, what `/pools` says of it, and a flood."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hybridserve.cluster.routing.admission import REJECT_REASONS

pytestmark = pytest.mark.e2e

SHORT = "def fibonacci(n):"
LONG = "# the sum of two numbers\ndef add(a, b):\n    return a + b\n\n" * 30
GREEDY = {"temperature": 0, "max_tokens": 12}
FLOOD = 40


@pytest.fixture(scope="module")
def pooled(server, new_server) -> Iterator:
    """Two engines want the cores that another server would keep."""
    server.stop()
    command = [str(Path(sys.executable).parent / "hybridserve"), "serve", "--drain-s", "60"]
    one = new_server(command, server.port, "demo-pools.yaml")
    one.start()
    yield one
    one.stop()


def pools(server) -> dict[str, dict]:
    return {pool["name"]: pool for pool in httpx.get(f"{server.url}/pools", timeout=10).json()["pools"]}


def idle_pools(server) -> dict[str, dict]:
    """Once the engines have dropped what an ingress ended at a stop string."""
    deadline = time.monotonic() + 10
    while outstanding(found := pools(server)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def outstanding(found: dict[str, dict]) -> int:
    """Tokens, as the engines themselves report."""
    replicas = [one for pool in found.values() for one in pool["replicas"]["list"]]
    return sum(one["load"]["outstanding_tokens"] for one in replicas)


def test_prompts_land_in_their_pools_and_are_answered_alike(pooled, offline) -> None:
    fresh = pools(pooled)
    assert list(fresh) == ["short", "long"]
    assert fresh["short"]["bucket"] == {"above": 0, "max_prompt_tokens": 256}
    assert fresh["long"]["bucket"] == {"above": 256, "max_prompt_tokens": None}
    # each engine has answered a golden prompt, which is not routed
    assert {pool["replicas"]["up"] for pool in fresh.values()} == {1}
    assert all(not pool["decisions"]["own"] for pool in fresh.values())
    wanted = [answers[0].text for answers in offline([SHORT, LONG], **GREEDY)]
    client = pooled.client(timeout=60)
    for prompt, text in zip((SHORT, LONG), wanted, strict=True):
        answer = client.completions.create(model="demo", prompt=prompt, **GREEDY)
        assert answer.choices[0].text == text
    # a stated max_tokens counts
    client.completions.create(model="demo", prompt=SHORT, max_tokens=300, stop=["\n"])
    after = idle_pools(pooled)
    assert (after["short"]["decisions"]["own"], after["long"]["decisions"]["own"]) == (1, 2)
    for name in fresh:
        [before], [now] = fresh[name]["replicas"]["list"], after[name]["replicas"]["list"]
        assert now["name"] == before["name"]
        assert now["load"]["steps"] > before["load"]["steps"]
    samples = pooled.metrics()
    assert samples["hybridserve_router_decisions_total{own,long}"] == 2
    assert samples["hybridserve_pool_replicas{short}"] == 1


def test_an_unknown_priority_is_refused(pooled) -> None:
    headers = {"x-hybridserve-priority": "urgent"}
    answer = httpx.post(f"{pooled.url}/generate", json={"prompt": SHORT}, headers=headers)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "x-hybridserve-priority" and "'urgent'" in error["message"]


@pytest.mark.parametrize("name", ["x-request-id", "x-session-id", "serve_multiplexed_model_id"])
def test_a_header_that_serve_cannot_decode(pooled, name: str) -> None:
    """The request is answered under a name of the server's own."""
    answer = httpx.get(f"{pooled.url}/v1/models", headers={name: b"caf\xe9"}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"].isascii()


def test_a_flood_is_told_why_and_when_to_come_back(pooled) -> None:
    before = pools(pooled)["long"]

    async def one(client: httpx.AsyncClient, index: int) -> httpx.Response:
        # some 25 fit in the budget of 16,384 tokens, and half as many of low priority
        body = {"prompt": LONG, "max_tokens": 10, "ignore_eos": True, "temperature": 0}
        headers = {"x-hybridserve-priority": ("high", "low")[index % 2]}
        return await client.post("/v1/completions", json=body, headers=headers)

    async def flood() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=FLOOD)
        async with httpx.AsyncClient(base_url=pooled.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(FLOOD)))

    answers = asyncio.run(flood())
    good = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(good) + len(refused) == FLOOD and good and refused
    assert len({answer.json()["choices"][0]["text"] for answer in good}) == 1
    for answer in refused:
        assert answer.headers["x-hybridserve-reject-reason"] in REJECT_REASONS
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "overloaded"
    after = pools(pooled)["long"]
    assert after["decisions"]["own"] - before["decisions"]["own"] == len(good)
    counted = Counter(
        {reason: sum(by_priority.values()) for reason, by_priority in after["rejections"].items()}
    )
    assert counted == Counter(answer.headers["x-hybridserve-reject-reason"] for answer in refused)
    # low priority has half of the budget
    by_priority = Counter(answer.request.headers["x-hybridserve-priority"] for answer in good)
    assert by_priority["high"] > by_priority["low"]
    # never the reverse: the short pool stayed out of it
    assert pools(pooled)["short"]["decisions"]["borrowed"] == 0
    assert after["budget"]["outstanding_tokens"] == after["in_flight_here"] == 0


def test_a_second_interrupt_ends_all_processes_at_once(pooled) -> None:
    """The last test: it ends the server, long before its answer or the 60 s that this might have gone on."""
    body = {"prompt": SHORT, "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{pooled.url}/v1/completions", json=body, timeout=60) as stream:
        assert next(stream.iter_lines())
        # what was started is kept, so that `stop` fails when something of it is left
        assert len(pooled.pids()) > 5
        pooled.interrupt()
        deadline = time.monotonic() + 30
        while "stopping: new requests are refused" not in pooled.log.read_text():
            assert time.monotonic() < deadline, pooled.tail()
            time.sleep(0.05)
        pooled.interrupt()
        assert pooled.wait_for_end() == 130
    said = pooled.log.read_text().partition("stopping: new requests")[2]
    assert "\nstopped at once" in said and "Traceback" not in said, said
