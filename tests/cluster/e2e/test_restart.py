"""An engine that is killed, and a server that is stopped and started again; both transports of tokens."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

pytestmark = pytest.mark.e2e

PROMPT = "def fibonacci(n):"
GREEDY = {"temperature": 0, "max_tokens": 40}
# of a death to what its clients are told; a health check a second is the slowest way to notice
TOLD_S = 5.0


@pytest.fixture(scope="module")
def by_handle(make_server):
    """`hybridserve serve`, tokens by Serve's own streaming calls."""
    command = str(Path(sys.executable).parent / "hybridserve")
    return make_server([command, "serve"], {"token_transport": "handle"})


@pytest.fixture(params=["bus", "handle"])
def either(request: pytest.FixtureRequest):
    return request.getfixturevalue("server" if request.param == "bus" else "by_handle")


def streamed(client: openai.OpenAI, prompt: str) -> str:
    stream = client.completions.create(model="demo", prompt=prompt, stream=True, **GREEDY)
    return "".join(choice.text for part in stream for choice in part.choices)


def test_the_handle_gives_the_stream_that_the_bus_gives(server, by_handle, offline) -> None:
    prompts = [PROMPT, "import os\n", "# größer als 数 🎉\n", "class A:\n"]
    wanted = [answers[0].text for answers in offline(prompts, **GREEDY)]
    for one in (server, by_handle):
        clients = [one.client()] * len(prompts)
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(streamed, clients, prompts)) == wanted


def test_a_handle_stream_that_is_closed_frees_its_request(by_handle) -> None:
    stream = by_handle.client().completions.create(
        model="demo", prompt=PROMPT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    by_handle.seconds_until(lambda occupancy: occupancy[0] == 1 and occupancy[3] > 0)
    stream.close()
    assert by_handle.seconds_until(lambda occupancy: occupancy == (0, 0, 0, 0)) < 1.0


def test_the_line_that_hybridserve_serve_prints_works(by_handle) -> None:
    [line] = [line for line in by_handle.log.read_text().splitlines() if line.startswith("curl ")]
    assert by_handle.url in line
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert '"finish_reason"' in answer.stdout, answer.stdout


def test_a_killed_engine_is_told_at_once_and_replaced(either, offline) -> None:
    client = either.client(timeout=60)
    [[wanted]] = offline([PROMPT], **GREEDY)
    long = {"model": "demo", "prompt": PROMPT, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(1) as threads:
        streams = [iter(client.completions.create(**long, stream=True)) for _ in range(3)]
        whole = threads.submit(client.completions.create, **long)
        for stream in streams:
            next(stream)
        either.seconds_until(lambda occupancy: occupancy[0] == 4)
        killed = either.engine_pid()
        os.kill(killed, signal.SIGKILL)
        began = time.monotonic()
        for stream in streams:
            # an event of OpenAI's error shape, not a stream that just ends
            with pytest.raises(openai.APIError, match="died"):
                list(stream)
        with pytest.raises(openai.InternalServerError, match="died") as failed:
            whole.result()
    assert failed.value.status_code == 503
    assert time.monotonic() - began < TOLD_S
    assert httpx.get(f"{either.url}/health").status_code == 200
    assert httpx.get(f"{either.url}/ready", timeout=10).status_code == 503
    either.wait_until_ready()
    assert either.engine_pid() != killed
    assert client.completions.create(model="demo", prompt=PROMPT, **GREEDY).choices[0].text == wanted.text
    assert streamed(client, PROMPT) == wanted.text
    assert either.seconds_until(lambda occupancy: occupancy == (0, 0, 0, 0)) < 2.0


def test_a_server_that_is_stopped_leaves_nothing_and_starts_on_the_same_port(by_handle, offline) -> None:
    [[wanted]] = offline([PROMPT], **GREEDY)
    assert len(by_handle.pids()) > 3
    # fails when a process is left
    by_handle.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{by_handle.url}/health")
    by_handle.start()
    assert streamed(by_handle.client(), PROMPT) == wanted.text
