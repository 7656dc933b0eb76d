"""Rolling updates of a real Serve under load: a bad version never serves, a good one takes over."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hybridserve.cluster.update import Update, UpdateFailed

pytestmark = pytest.mark.usefixtures("ray_instance")
NAME = "rolled"


class DirectServe:
    """As the dashboard's REST interface, which test clusters do not have."""

    def __init__(self) -> None:
        from ray.serve.context import _get_global_client

        self.client = _get_global_client()

    def details(self) -> dict[str, Any]:
        from ray.serve.schema import ServeInstanceDetails

        details = ServeInstanceDetails(**self.client.get_serve_details())
        plain = details._get_user_facing_json_serializable_dict(exclude_unset=True)
        ours = {NAME: plain["applications"][NAME]} if NAME in plain["applications"] else {}
        return {"applications": ours, "http_options": plain["http_options"]}

    def deploy(self, config: dict[str, Any]) -> None:
        from ray.serve.schema import ServeDeploySchema

        self.client.deploy_apps(ServeDeploySchema.model_validate(config))


class Load:
    """Streams one answer after another through HTTP, several at a time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.failures: list[str] = []
        self.answers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(60)

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            await asyncio.gather(*(self._ask(client, seed) for seed in range(3)))

    async def _ask(self, client: httpx.AsyncClient, first: int) -> None:
        body = {"prompt": [10 + first], "max_tokens": 20, "stream": True, "ignore_eos": True}
        while not self._stop.is_set():
            try:
                answer = await client.post(f"{self.url}/v1/completions", json=body)
                good = answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
                if not good or '"error"' in answer.text:
                    self.failures.append(f"{answer.status_code} {answer.text[-200:]}")
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
            self.answers += 1


@pytest.fixture
def serve() -> Iterator[DirectServe]:
    one = DirectServe()
    yield one
    from ray import serve

    # also out of what is wanted, or a controller that starts again would bring it back
    one.deploy({"applications": []})
    serve.delete(NAME)


@pytest.fixture
def version(demo_model: Path):
    """version(max_batch_size, error): an application's configuration."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def make(max_batch_size: int, error: str | None = None) -> dict[str, Any]:
        settings = {
            "model": {"path": str(demo_model), "name": "demo"},
            "serving": {"max_batch_size": max_batch_size, "longest_answer_s": 20, "device": "cpu"},
        }
        return {
            "name": NAME,
            "route_prefix": f"/{NAME}",
            "import_path": "fake_application:build",
            "runtime_env": {"env_vars": {"PYTHONPATH": path}},
            "args": {"settings": settings, "error": error},
        }

    return make


def replicas(serve: DirectServe) -> dict[str, set[str]]:
    deployments = serve.details()["applications"][NAME]["deployments"]
    return {
        name: {one["replica_id"] for one in deployment["replicas"] if one["state"] == "RUNNING"}
        for name, deployment in deployments.items()
    }


def test_a_bad_version_never_serves_and_a_good_one_takes_over(serve: DirectServe, version) -> None:
    http = serve.details()["http_options"]
    url = f"http://{http['host']}:{http['port']}/{NAME}"
    serve.deploy({"applications": [version(8)]})
    deadline = time.monotonic() + 120
    while not is_ready(url):
        assert time.monotonic() < deadline, serve.details()
        time.sleep(0.1)
    first = replicas(serve)
    with Load(url) as load:
        with pytest.raises(UpdateFailed, match="the golden prompt went wrong") as failed:
            Update(serve, version(16, error="the golden prompt went wrong"), 120, print).run()
        assert "is deployed again, and serves" in str(failed.value)
        # the pool's replica is the one it was: it never stopped
        assert replicas(serve)["pool"] == first["pool"]
        Update(serve, version(32), 120, print).run()
        second = replicas(serve)
        assert all(second[name] and not second[name] & first[name] for name in first)
        answered = load.answers
        wait_until(lambda: load.answers >= answered + 6)
    assert load.failures == []
    assert load.answers > 20


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until(reached) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)
