"""HTTPS as Serve's proxy does it: its own server with `http_options`' certificates, and OpenAI's client."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest
from ray.serve._private.http_util import start_asgi_http_server
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.gate import Access, Gate
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.ingress.errors import translate


async def models(request) -> JSONResponse:
    model = {"id": "demo", "object": "model", "created": 1, "owned_by": "hybridserve"}
    return JSONResponse({"object": "list", "data": [model], "scheme": request.url.scheme})


@pytest.fixture
def key(tmp_path: Path) -> str:
    return key_edit.add(tmp_path / "keys.yaml", "team", datetime.now(UTC))


@pytest.fixture
def serve(tmp_path: Path, key: str, free_port: Callable[[], int]) -> Iterator[Callable[..., str]]:
    """serve(**http_options): the URL of a server behind keys, without its scheme."""
    stops: list[Callable[[], None]] = []

    def start(**options: str) -> str:
        app = Starlette(routes=[Route("/v1/models", models)])
        gate = Gate(app, Access(KeyFile(tmp_path / "keys.yaml")), lambda error: translate(error, "1"))
        http = HTTPOptions(host="127.0.0.1", port=free_port(), **options)
        servers = []

        async def run() -> None:
            task, server = await start_asgi_http_server(gate, http, event_loop=asyncio.get_running_loop())
            servers.append(server)
            await task

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        deadline = time.monotonic() + 30
        while not (servers and servers[0].started):
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)

        def stop() -> None:
            servers[0].should_exit = True
            thread.join(30)
            assert not thread.is_alive()

        stops.append(stop)
        return f"127.0.0.1:{http.port}"

    yield start
    for stop in stops:
        stop()


def test_openais_client_over_https(new_authority: Callable, serve: Callable[..., str], key: str) -> None:
    files = new_authority("ours").sign("server")
    url = serve(ssl_certfile=files["certfile"], ssl_keyfile=files["keyfile"])
    context = ssl.create_default_context(cafile=files["cafile"])
    # closed before the server, which would wait for its side of the connections' end
    with (
        httpx.Client(verify=context) as trusting,
        openai.OpenAI(base_url=f"https://{url}/v1", api_key=key, http_client=trusting) as client,
    ):
        listed = client.models.list()
        assert (listed.data[0].id, listed.model_extra["scheme"]) == ("demo", "https")
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="hs-wrong").models.list()
    # who does not know the authority does not talk to it, nor does anybody in the clear
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{url}/v1/models")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{url}/v1/models", headers={"Authorization": f"Bearer {key}"})


def test_what_serves_server_takes_for_the_client(serve: Callable[..., str], tmp_path: Path, key: str) -> None:
    """uvicorn believes X-Forwarded-For from 127.0.0.1, as docs/security.md says: this fails when it stops."""
    url = serve()
    got = httpx.get(f"http://{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    assert got.json()["scheme"] == "http"
    forwarded = {"Authorization": f"Bearer {key}", "X-Forwarded-Proto": "https"}
    assert httpx.get(f"http://{url}/v1/models", headers=forwarded).json()["scheme"] == "https"
