"""An engine that is killed; a server that is stopped, and another on its port with the other transport.

The other one's Ray speaks TLS, so that this is tried without a start of its own.
"""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import ray

from ..authority import Authority

pytestmark = pytest.mark.e2e

PROMPT = "def fibonacci(n):"
GREEDY = {"temperature": 0, "max_tokens": 40}
LONG = {"model": "demo", "prompt": PROMPT, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
NOTHING = (0.0, 0.0, 0.0, 0.0)
# from an engine's death to what its clients are told; a health check a second is the slowest way to notice
TOLD_S = 5.0
# shorter than any answer of LONG
DRAIN_S = 1.5


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A node's certificate, key and authority; its address is in it, or Ray's processes find no other."""
    addresses = {"127.0.0.1", ray.util.get_node_ip_address()}
    return Authority(tmp_path_factory.mktemp("tls"), sorted(addresses)).sign("node")


@pytest.fixture(scope="module")
def by_handle(server, new_server, node: dict[str, str]) -> Iterator:
    """`hybridserve serve`, tokens by Serve's own streaming calls, on the port of the server it replaces.

    Its Ray speaks TLS, as docs/security.md says.
    """
    server.start_if_stopped()
    assert len(server.pids()) > 5
    # fails when a process is left
    server.stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    command = [str(Path(sys.executable).parent / "hybridserve"), "serve", "--drain-s", str(DRAIN_S)]
    tls = {
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": node["certfile"],
        "RAY_TLS_SERVER_KEY": node["keyfile"],
        "RAY_TLS_CA_CERT": node["cafile"],
    }
    serving = {"token_transport": "handle", "retry_wait_s": 0}
    other = new_server(command, server.port, environment=tls, **serving)
    other.start()
    yield other
    other.stop()


def streamed(client: openai.OpenAI, prompt: str) -> str:
    stream = client.completions.create(model="demo", prompt=prompt, stream=True, **GREEDY)
    return "".join(choice.text for part in stream for choice in part.choices)


def kill_the_engine(server, wanted: str) -> None:
    """Kill it under three streams and a whole answer; all are told, and a new engine says `wanted`."""
    client = server.client(timeout=60)
    with ThreadPoolExecutor(1) as threads:
        streams = [iter(client.completions.create(**LONG, stream=True)) for _ in range(3)]
        whole = threads.submit(client.completions.create, **LONG)
        for stream in streams:
            next(stream)
        server.seconds_until(lambda occupancy: occupancy[0] == 4)
        killed = server.engine_pid()
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
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert not server.is_ready()
    server.wait_until_ready()
    assert server.engine_pid() != killed
    whole = client.completions.create(model="demo", prompt=PROMPT, **GREEDY)
    assert whole.choices[0].text == streamed(client, PROMPT) == wanted
    server.seconds_until(lambda occupancy: occupancy == NOTHING)


@pytest.mark.usefixtures("idle")
def test_what_a_killed_engine_had_begun_goes_on_in_the_one_that_replaces_it(server, offline) -> None:
    sampling = {"temperature": 0, "max_tokens": 400}
    [[wanted]] = offline([PROMPT], ignore_eos=True, **sampling)
    ask = {"model": "demo", "prompt": PROMPT, "extra_body": {"ignore_eos": True}, **sampling}
    client = server.client(timeout=180)
    before = server.metrics()
    with ThreadPoolExecutor(4) as threads:
        whole = threads.submit(client.completions.create, **ask)
        streams = [iter(client.completions.create(**ask, stream=True)) for _ in range(3)]
        begun = [next(stream).choices[0].text for stream in streams]
        server.seconds_until(lambda occupancy: occupancy[0] == 4)
        killed = server.engine_pid()
        os.kill(killed, signal.SIGKILL)
        rests = list(threads.map(list, streams))
        texts = ["".join(c.text for part in rest for c in part.choices) for rest in rests]
        assert [a + b for a, b in zip(begun, texts, strict=True)] == [wanted.text] * 3
        answer = whole.result()
    assert (answer.choices[0].text, answer.usage.completion_tokens) == (wanted.text, 400)
    assert server.engine_pid() != killed
    after = server.metrics()
    retries = {
        outcome: after[name] - before.get(name, 0)
        for outcome in ("restarted", "resumed", "failed")
        for name in [f"hybridserve_retries_total{{{outcome}}}"]
    }
    assert retries["failed"] == 0 and retries["resumed"] >= 3 and sum(retries.values()) == 4


def test_after_a_stop_the_same_port_gives_the_same_text_by_the_other_transport(by_handle, offline) -> None:
    prompts = [PROMPT, "import os\n", "# größer als 数 🎉\n", "class A:\n"]
    wanted = [answers[0].text for answers in offline(prompts, **GREEDY)]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(streamed, [by_handle.client()] * 4, prompts)) == wanted


@pytest.mark.parametrize("name", ["gcs_server", "raylet", "ray::EngineActor"])
def test_in_tls_rays_processes_talk_to_nobody_else(by_handle, node: dict[str, str], name: str) -> None:
    def first_bytes(port: int, *certificate: str) -> bytes:
        context = ssl.create_default_context(cafile=node["cafile"])
        context.set_alpn_protocols(["h2"])
        if certificate:
            context.load_cert_chain(*certificate)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secret,
        ):
            # one that is turned away hears so, or only that it is over
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                return secret.recv(64)
            return b""

    ports = by_handle.ports_of(name)
    assert ports
    for port in ports:
        # a member hears the server's settings, as HTTP/2 begins
        assert first_bytes(port, node["certfile"], node["keyfile"])
        assert not first_bytes(port)


def test_the_line_that_hybridserve_serve_prints_works(by_handle) -> None:
    deadline = time.monotonic() + 10
    # it asks whether the server is ready a few times a second
    while "\ncurl " not in (log := by_handle.log.read_text()):
        assert time.monotonic() < deadline, log
        time.sleep(0.1)
    [line] = [line for line in log.splitlines() if line.startswith("curl ")]
    assert by_handle.url in line
    answer = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=True)
    assert '"finish_reason"' in answer.stdout, answer.stdout


def test_by_the_handle_a_stream_that_is_closed_frees_its_request(by_handle) -> None:
    stream = by_handle.client().completions.create(**LONG, stream=True)
    next(iter(stream))
    by_handle.seconds_until(lambda occupancy: occupancy[0] == 1 and occupancy[3] > 0)
    stream.close()
    assert by_handle.seconds_until(lambda occupancy: occupancy == NOTHING) < 5.0


def test_by_the_handle_a_killed_engine_is_told_and_replaced(by_handle, offline) -> None:
    [[wanted]] = offline([PROMPT], **GREEDY)
    kill_the_engine(by_handle, wanted.text)


def test_a_stop_refuses_what_comes_and_tells_what_it_cuts_off(by_handle) -> None:
    client = by_handle.client(timeout=60)
    refused: list[openai.APIStatusError] = []

    def ask_until_the_end() -> None:
        while True:
            try:
                client.completions.create(model="demo", prompt=PROMPT, max_tokens=1)
            except openai.APIStatusError as error:
                refused.append(error)
            except openai.APIConnectionError:
                return

    with ThreadPoolExecutor(2) as threads:
        stream = iter(client.completions.create(**LONG, stream=True))
        whole = threads.submit(client.completions.create, **LONG)
        next(stream)
        by_handle.seconds_until(lambda occupancy: occupancy[0] == 2)
        asking = threads.submit(ask_until_the_end)
        by_handle.interrupt()
        with pytest.raises(openai.APIError, match="the server is stopping") as told:
            list(stream)
        assert told.value.code == "server_stopping"
        assert told.value.body["request_id"].startswith("cmpl-")
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            whole.result()
        asking.result()
    assert {(error.status_code, error.code) for error in refused} == {(503, "server_stopping")}
    assert refused[0].response.headers["retry-after"]
    assert by_handle.wait_for_end() == 0
