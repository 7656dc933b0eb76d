"""A client that goes away frees what its request held, at once, and its neighbours do not notice."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle")]

LONG = {"model": "demo", "prompt": "import os\n", "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
# a step takes some 10 ms here, and an answer that nobody ends 20 s; the rest is for a machine that is busy
SOON_S = 5.0


def nothing(occupancy: tuple[float, ...]) -> bool:
    return occupancy == (0.0, 0.0, 0.0, 0.0)


def test_a_stream_that_is_closed(server, client: openai.OpenAI) -> None:
    stream = client.completions.create(**LONG, stream=True)
    next(iter(stream))
    server.seconds_until(lambda occupancy: occupancy[0] == 1 and occupancy[2] > 0 and occupancy[3] > 0)
    stream.close()
    assert server.seconds_until(nothing) < SOON_S


def test_a_client_that_waits_for_a_whole_answer_and_gives_up(server, client: openai.OpenAI) -> None:
    seen: list[tuple[float, ...]] = []
    watcher = threading.Thread(
        target=lambda: seen.append(server.seconds_until(lambda occupancy: occupancy[0] == 1))
    )
    watcher.start()
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.5).completions.create(**LONG)
    assert server.seconds_until(nothing) < SOON_S
    watcher.join()
    assert seen, "the request never ran"


def test_a_client_that_leaves_while_its_prompt_is_read(server) -> None:
    before = server.metrics()
    body = {"model": "demo", "prompt": [7] * 2000, "max_tokens": 40, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.1)
    assert server.seconds_until(nothing) < SOON_S
    after = server.metrics()
    assert after["hybridserve_prompt_tokens_total"] == before["hybridserve_prompt_tokens_total"] + 2000
    cancelled = "hybridserve_requests_total{cancelled}"
    assert after[cancelled] == before.get(cancelled, 0) + 1


def test_many_that_leave_at_different_moments(server, client: openai.OpenAI) -> None:
    def leave(after: float) -> None:
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        time.sleep(after)
        stream.close()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, [0.03 * (i % 7) for i in range(24)]))
    assert server.seconds_until(nothing) < SOON_S


def test_neighbours_go_on(server, client: openai.OpenAI, offline) -> None:
    prompt = "def fibonacci(n):"
    sampling = {"temperature": 0, "max_tokens": 500}
    [[wanted]] = offline([prompt], ignore_eos=True, **sampling)
    before = server.metrics()

    def read() -> str:
        stream = client.completions.create(
            model="demo", prompt=prompt, stream=True, extra_body={"ignore_eos": True}, **sampling
        )
        return "".join(choice.text for part in stream for choice in part.choices)

    def leave(after: float) -> None:
        stream = client.completions.create(**LONG, stream=True)
        next(iter(stream))
        time.sleep(after)
        stream.close()

    with ThreadPoolExecutor(4) as threads:
        neighbour = threads.submit(read)
        leavers = [threads.submit(leave, 0.1 * i) for i in range(3)]
        for leaver in leavers:
            leaver.result()
        assert not neighbour.done()
        # the neighbour alone is left
        assert server.seconds_until(lambda occupancy: occupancy[0] == 1) < SOON_S
        assert not neighbour.done()
        assert neighbour.result() == wanted.text
    cancelled = "hybridserve_requests_total{cancelled}"
    assert server.metrics()[cancelled] == before.get(cancelled, 0) + 3
