"""A rolling update that watches itself: deploys a configuration, and takes it back when it does not come up.

Serve starts new replicas, which answer their golden prompt before they count as up, and stops old ones only
then (`serving.max_surge_percent`). When a new one fails, Serve stops there and the old ones go on. What is
left to do is to tell why, and to make the old configuration the wanted one again: else the next scaling would
start replicas that fail. Knows Serve's details and configurations as JSON, nothing of how they are fetched.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

_POLL_S = 1.0
_RUNNING = "RUNNING"
# an unhealthy replica may be one that is being replaced; where new ones are, Serve fails the update itself
_FAILED = "DEPLOY_FAILED"


class Serve(Protocol):
    """A cluster's Serve."""

    def details(self) -> dict[str, Any]:
        """As `GET /api/serve/applications/` answers."""

    def deploy(self, config: dict[str, Any]) -> None:
        """As `PUT /api/serve/applications/`."""


class UpdateFailed(Exception):
    """The new version is not served; the message says why, and what is."""


@dataclass(frozen=True)
class _Before:
    """What was deployed before the update."""

    config: dict[str, Any]
    """Of all applications, as it can be deployed again."""
    app: dict[str, Any]
    """The application's own."""
    deployed: float
    """When, by Serve's clock."""
    serves: bool
    """It was running, so that there is something to go back to."""


class Update:
    """One update of one application.

    Args:
        serve: of the cluster.
        app: the application's part of a Serve configuration.
        timeout_s: for the new version to be served by all replicas, and for going back.
        say: is told of the progress, a line at a time.
        clock, sleep: seconds.
    """

    def __init__(
        self,
        serve: Serve,
        app: dict[str, Any],
        timeout_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._serve = serve
        self._app = app
        self._name = str(app.get("name") or "default")
        self._timeout_s = timeout_s
        self._say = say
        self._clock = clock
        self._sleep = sleep
        self._said: dict[str, str] = {}

    def run(self) -> None:
        """Returns when the new version is served by all replicas.

        Raises:
            ValueError: there is no such application to update.
            UpdateFailed: it did not come up; the version before it is wanted again, and serves.
        """
        before = self._before()
        if _same(before.app, self._app) and before.serves:
            self._say(f"application {self._name} is deployed like this already")
            return
        self._serve.deploy(_replaced(before.config, self._app))
        failure = self._wait(self._app, before.deployed)
        if failure is None:
            self._say(f"application {self._name} is updated")
            return
        if not before.serves:
            raise UpdateFailed(f"{failure}\nthe version before it did not run either")
        self._say(f"going back, as the update failed: {failure}")
        self._serve.deploy(before.config)
        trouble = self._wait(before.app, before.deployed)
        if trouble is not None:
            raise UpdateFailed(f"{failure}\ngoing back is not done either: {trouble}")
        raise UpdateFailed(f"{failure}\nthe version before it is deployed again, and serves")

    def _before(self) -> _Before:
        details = self._serve.details()
        known = details["applications"]
        if self._name not in known:
            names = ", ".join(known) or "none"
            raise ValueError(
                f"no application {self._name!r} is deployed to be updated (there is {names}); "
                "`serve deploy` deploys it"
            )
        for name, app in known.items():
            if not app.get("deployed_app_config"):
                raise ValueError(
                    f"application {name!r} was not deployed from a configuration, so it could not be kept"
                )
        app = known[self._name]
        config = {
            "proxy_location": details.get("proxy_location"),
            "http_options": details.get("http_options"),
            "applications": [one["deployed_app_config"] for one in known.values()],
        }
        return _Before(
            config={key: value for key, value in config.items() if value},
            app=app["deployed_app_config"],
            deployed=app["last_deployed_time_s"],
            serves=app["status"] == _RUNNING,
        )

    def _wait(self, wanted: dict[str, Any], after: float) -> str | None:
        """None when the configuration is served by all replicas, else why it is not."""
        deadline = self._clock() + self._timeout_s
        while True:
            app = self._serve.details()["applications"].get(self._name)
            if app is None:
                return f"application {self._name} is gone"
            self._report(app)
            # until Serve has looked at the configuration, what it says is of the one before
            if _same(app["deployed_app_config"], wanted) and app["last_deployed_time_s"] > after:
                if app["status"] == _RUNNING and all(map(_is_settled, app["deployments"].values())):
                    return None
                if app["status"] == _FAILED:
                    return _reason(app)
            if self._clock() > deadline:
                return f"not done within {self._timeout_s:g} s: {_reason(app)}"
            self._sleep(_POLL_S)

    def _report(self, app: dict[str, Any]) -> None:
        """What has changed since the last report."""
        for name, deployment in app["deployments"].items():
            states = [replica["state"] for replica in deployment["replicas"]]
            counts = ", ".join(f"{states.count(one)} {one.lower()}" for one in sorted(set(states)))
            line = f"{name}: {deployment['status'].lower()}, replicas: {counts or 'none'}"
            if self._said.get(name) != line:
                self._said[name] = line
                self._say(line)


def _replaced(config: dict[str, Any], app: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one application's part in place of what it had."""
    name = app.get("name") or "default"
    others = [one for one in config["applications"] if (one.get("name") or "default") != name]
    return {**config, "applications": [*others, app]}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both describe the same application; Serve may have written defaults into either."""
    keys = ("import_path", "args", "runtime_env", "route_prefix", "deployments")
    return all((one.get(key) or None) == (other.get(key) or None) for key in keys)


def _is_settled(deployment: dict[str, Any]) -> bool:
    """All replicas are of the new version and up, and the old ones gone."""
    return deployment["status"] == "HEALTHY"


def _reason(app: dict[str, Any]) -> str:
    """What Serve says of the deployments that are not well, or else of the application."""
    return "\n".join(_reasons(app)) or f"application: {app['status']}: {app['message']}"


def _brief(message: str) -> str:
    """Serve's message without an error's trace: the error itself is its last line."""
    if "Traceback (most recent call last)" not in message:
        return message.strip()
    return message.strip().splitlines()[-1]


def _reasons(app: dict[str, Any]) -> Iterator[str]:
    for name, deployment in app["deployments"].items():
        if not _is_settled(deployment):
            message = _brief(deployment["message"])
            starting = sum(replica["state"] == "STARTING" for replica in deployment["replicas"])
            waits = f"{starting} replicas are starting, or wait for room in the cluster" if starting else ""
            yield f"{name}: {'; '.join(filter(None, (deployment['status'], message, waits)))}"
