"""What `hybridserve update` does with what Serve says, by a Serve that is told what to say."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from hybridserve.cluster.cli.main import app as cli
from hybridserve.cluster.serve_file import BUILDER
from hybridserve.cluster.update import Update, UpdateFailed

OLD = {"name": "ours", "import_path": BUILDER, "args": {"version": 1}}
NEW = {**OLD, "args": {"version": 2}}
OTHER = {"name": "other", "import_path": "other:app"}


SERVES_WORDS = """The deployment failed to start 1 times in a row during a rolling update. Error:
ray::ServeReplica:ours:pool.initialize_and_get_metadata()
RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1, in __init__
RuntimeError: the golden prompt: 7 instead of 8
"""


class ScriptedServe:
    """Says, after each deploy, one state after another, and then the last one for ever.

    Args:
        scripts: for each deploy the states: (application's status, deployment's status, message, replicas).
    """

    def __init__(self, *scripts: list[tuple[str, str, str, list[str]]], status: str = "RUNNING") -> None:
        self.scripts = list(scripts)
        self.script: Iterator = iter([])
        self.deployed: list[dict[str, Any]] = []
        self.time = 100.0
        self.app = OLD
        self.state = (status, "HEALTHY", "", ["RUNNING"])

    def details(self) -> dict[str, Any]:
        self.state = next(self.script, self.state)
        status, deployment, message, replicas = self.state
        pool = {
            "status": deployment,
            "message": message,
            "replicas": [{"state": state} for state in replicas],
        }
        app = {
            "status": status,
            "message": "",
            "deployed_app_config": copy.deepcopy(self.app),
            "last_deployed_time_s": self.time,
            "deployments": {"pool": pool},
        }
        other = {**app, "status": "RUNNING", "deployed_app_config": OTHER, "deployments": {}}
        http = {"host": "0.0.0.0", "port": 9}
        return {
            "proxy_location": "EveryNode",
            "http_options": http,
            "applications": {"ours": app, "other": other},
        }

    def deploy(self, config: dict[str, Any]) -> None:
        self.deployed.append(config)
        [self.app] = [one for one in config["applications"] if one["name"] == "ours"]
        self.time += 1
        self.script = iter(self.scripts.pop(0))


@pytest.fixture
def update() -> Callable[..., list[str]]:
    """update(serve, app): what was said."""

    def run(serve: ScriptedServe, app: dict[str, Any] = NEW, lines: list[str] | None = None) -> list[str]:
        now = [0.0]
        said = [] if lines is None else lines

        def sleep(seconds: float) -> None:
            now[0] += seconds

        Update(serve, app, 60, said.append, clock=lambda: now[0], sleep=sleep).run()
        return said

    return run


GOOD = [
    ("DEPLOYING", "UPDATING", "", ["RUNNING", "STARTING"]),
    ("RUNNING", "UPDATING", "", ["RUNNING", "STOPPING"]),
    ("RUNNING", "HEALTHY", "", ["RUNNING"]),
]
BAD = [
    ("DEPLOYING", "UPDATING", "", ["RUNNING", "STARTING"]),
    ("DEPLOY_FAILED", "DEPLOY_FAILED", SERVES_WORDS, ["RUNNING"]),
]


def test_a_good_version_stays_and_other_applications_too(update) -> None:
    serve = ScriptedServe(GOOD)
    said = update(serve)
    [config] = serve.deployed
    assert config["applications"] == [OTHER, NEW]
    assert (config["proxy_location"], config["http_options"]["port"]) == ("EveryNode", 9)
    assert said[0] == "pool: updating, replicas: 1 running, 1 starting"
    assert said[-1] == "application ours is updated"
    # nothing is said twice
    assert len(set(said)) == len(said)


def test_a_bad_version_is_taken_back_and_the_reason_told(update) -> None:
    serve = ScriptedServe(BAD, GOOD)
    said: list[str] = []
    with pytest.raises(UpdateFailed, match="golden prompt: 7 instead of 8") as failed:
        update(serve, lines=said)
    assert str(failed.value) == (
        "pool: DEPLOY_FAILED; RuntimeError: the golden prompt: 7 instead of 8\n"
        "the version before it is deployed again, and serves"
    )
    assert [[app["name"] for app in config["applications"]] for config in serve.deployed] == [
        ["other", "ours"],
        ["ours", "other"],
    ]
    assert serve.app == OLD
    assert any(line.startswith("going back") for line in said)


def test_one_that_does_not_come_up_in_time_is_taken_back(update) -> None:
    serve = ScriptedServe([("DEPLOYING", "UPDATING", "", ["RUNNING", "STARTING"])], GOOD)
    with pytest.raises(UpdateFailed, match="not done within 60 s: pool: UPDATING; 1 replicas are starting"):
        update(serve)
    assert serve.app == OLD


def test_when_going_back_fails_both_are_told(update) -> None:
    serve = ScriptedServe(BAD, [("DEPLOY_FAILED", "DEPLOY_FAILED", "no room", [])])
    with pytest.raises(UpdateFailed, match=r"7 instead of 8\ngoing back is not done either: pool: .*no room"):
        update(serve)


def test_nothing_to_go_back_to(update) -> None:
    serve = ScriptedServe(BAD, status="DEPLOY_FAILED")
    with pytest.raises(UpdateFailed, match="did not run either"):
        update(serve)
    assert len(serve.deployed) == 1


def test_a_state_of_the_version_before_is_no_success(update) -> None:
    """Serve may answer before it has looked at the new configuration."""
    serve = ScriptedServe(BAD, GOOD)
    deploy = serve.deploy

    def deploy_late(config: dict[str, Any]) -> None:
        before = (serve.app, serve.time)
        deploy(config)
        after, script = (serve.app, serve.time), serve.script

        def states() -> Iterator:
            serve.app, serve.time = before
            yield ("RUNNING", "HEALTHY", "", ["RUNNING"])
            serve.app, serve.time = after
            yield from script

        serve.script = states()

    serve.deploy = deploy_late
    with pytest.raises(UpdateFailed):
        update(serve)


def test_the_same_again_is_nothing_to_do(update) -> None:
    serve = ScriptedServe()
    assert update(serve, {**OLD, "route_prefix": None}) == ["application ours is deployed like this already"]
    # unless it did not run
    serve = ScriptedServe(GOOD, status="DEPLOY_FAILED")
    update(serve, OLD)
    assert len(serve.deployed) == 1


def test_what_is_not_deployed_cannot_be_updated(update) -> None:
    serve = ScriptedServe()
    with pytest.raises(ValueError, match=r"no application 'mine' is deployed .*\(there is ours, other\)"):
        update(serve, {**NEW, "name": "mine"})
    serve.app = {}
    with pytest.raises(ValueError, match="'ours' was not deployed from a configuration"):
        update(serve)


def test_the_command_checks_the_file_and_the_address(tmp_path: Path, demo_model: Path, free_port) -> None:
    path = tmp_path / "serve.yaml"
    arguments = {"model": {"path": str(demo_model)}}

    def run() -> str:
        content = {"applications": [{"import_path": BUILDER, "args": arguments}]}
        path.write_text(yaml.safe_dump(content))
        result = CliRunner().invoke(
            cli, ["update", str(path), "--address", f"http://127.0.0.1:{free_port()}"]
        )
        assert isinstance(result.exception, ValueError), result
        return str(result.exception)

    assert "no dashboard answers there" in run()
    arguments["serving"] = {"page_size": 24}
    assert "page_size must be a power of two, got 24" in run()
