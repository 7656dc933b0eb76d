"""`hybridserve serve` with HAProxy before two ingress replicas: what a client sees, and what listens."""

import csv
import io
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import yaml

pytestmark = pytest.mark.e2e

MAIN = "import sys; from hybridserve.cluster.cli.main import main; sys.exit(main())"
BODY = {"model": "demo", "prompt": "import os\n", "ignore_eos": True}
# the way of a cancel, on a machine that has other work
SOON_S = 5.0


@pytest.fixture(scope="module")
def server(new_server: Callable[..., object], free_port: Callable[[], int]) -> Iterator[object]:
    """Its YAML asks for HAProxy and for two ingress replicas."""
    command = [sys.executable, "-c", MAIN, "serve", "--drain-s", "1"]
    server = new_server(command, free_port(), longest_answer_s=20)
    path = Path(server.command[-1])
    content = yaml.safe_load(path.read_text())
    content["applications"][0]["args"]["ingress"] = {"proxy": "haproxy", "num_replicas": 2}
    path.write_text(yaml.safe_dump(content))
    server.start()
    # an ingress replica hears of the engine's load once it has asked it for something
    ask_for_many(server)
    yield server
    server.stop()


def nothing(occupancy: tuple[float, ...]) -> bool:
    return occupancy == (0.0, 0.0, 0.0, 0.0)


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def haproxy_pids(server) -> list[int]:
    return [pid for pid in server.pids() if command_line(pid)[0].endswith("/haproxy")]


def admin(server, command: str) -> str:
    """What HAProxy answers on its administration socket."""
    arguments = command_line(haproxy_pids(server)[-1])
    path = Path(arguments[arguments.index("-f") + 1]).parent / "admin.sock"
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(command.encode() + b"\n")
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


def requests_by_replica(server) -> dict[str, int]:
    rows = csv.DictReader(io.StringIO(admin(server, "show stat").lstrip("# ")))
    return {row["svname"]: int(row["stot"]) for row in rows if row["svname"].startswith("SERVE_REPLICA")}


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address as hex, port) of the processes' TCP sockets that listen."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                # closed since the folder was listed
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


def ask_for_many(server) -> None:
    """24 requests, 8 at a time, all answered."""

    def ask(_: int) -> None:
        answer = httpx.post(f"{server.url}/v1/completions", json={**BODY, "max_tokens": 20}, timeout=60)
        answer.raise_for_status()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(24)))


def stream(server, max_tokens: int, **headers: str):
    body = {**BODY, "max_tokens": max_tokens, "stream": True}
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def test_events_come_one_by_one(server) -> None:
    with stream(server, 64) as response:
        arrivals = [(time.monotonic(), line) for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert arrivals[-1][1] == "data: [DONE]"
    # held back, they would all come at the end
    assert arrivals[-1][0] - arrivals[0][0] > 20 * (arrivals[-1][0] - arrivals[-2][0])
    assert len({when for when, _ in arrivals}) > 8


def test_a_client_that_leaves_frees_what_it_held_whatever_its_headers_say(server) -> None:
    server.seconds_until(nothing)
    for headers in ({}, {"x-request-disconnect-disabled": "?1"}):
        with stream(server, 1900, **headers) as response:
            # kept: a connection whose lines nobody holds is closed at once
            lines = response.iter_lines()
            next(lines)
            server.seconds_until(lambda occupancy: occupancy[0] == 1)
        assert server.seconds_until(nothing) < SOON_S


def test_a_client_cannot_set_a_timeout(server) -> None:
    with stream(server, 100, **{"x-request-timeout-seconds": "0.05"}) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


def test_a_request_id_that_is_not_utf8_is_replaced(server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"x-request-id": b"caf\xe9"}, timeout=30)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"].isascii()


def test_a_body_of_the_largest_size_reaches_the_ingress_and_a_larger_one_is_refused_by_it(server) -> None:
    head, tail = b'{"model": "demo", "max_tokens": 1, "prompt": "', b'"}'
    largest = head + b"x" * (8 * 2**20 - len(head) - len(tail)) + tail
    answer = httpx.post(f"{server.url}/v1/completions", content=largest, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    answer = httpx.post(f"{server.url}/v1/completions", content=largest + b" ", timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_ingress_replicas_share_the_requests(server) -> None:
    before = requests_by_replica(server)
    assert len(before) == 2

    ask_for_many(server)
    taken = [count - before[name] for name, count in requests_by_replica(server).items()]
    assert sum(taken) >= 24
    assert min(taken) >= 6


def test_nothing_but_the_http_port_is_open(server) -> None:
    loopback = "0100007F"
    assert listening(haproxy_pids(server)) == {(loopback, server.port)}
    # what else speaks HTTP: the replicas behind HAProxy, and Serve's proxy, which stands in for them. Other
    # ports of theirs are Ray's
    speakers = ("ray::ServeReplica", "ray::ProxyActor")
    open_ports = listening([pid for pid in server.pids() if command_line(pid)[0].startswith(speakers)])
    inside = {port for address, port in open_ports if address == loopback}
    assert sum(speaks_http(port) for port in inside) == 3
    outside = {port for address, port in open_ports if address != loopback}
    assert not any(speaks_http(port) for port in outside)


def test_a_stop_ends_streams_with_an_error_event(server) -> None:
    """The last test: it ends the server."""
    with stream(server, 1900) as response:
        lines = response.iter_lines()
        next(lines)
        server.interrupt()
        *_, error, done = [line for line in lines if line]
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert done == "data: [DONE]"
    assert server.wait_for_end() == 0


def speaks_http(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
