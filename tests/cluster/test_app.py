"""The application builder: the same settings give the same deployments."""

from pathlib import Path

import pytest
from ray.serve._private.build_app import build_app as build_deployments

from hybridserve.cluster.app import build_app, resolve_device
from hybridserve.cluster.pool.deployment import build_pool
from hybridserve.cluster.settings import load_settings


@pytest.fixture
def args(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "config.json").write_text("{}")
    return {"model": {"path": str(tmp_path)}, "ingress": {"num_replicas": 3}}


def described(args: dict[str, object]) -> list[tuple[object, ...]]:
    """What Serve compares when it decides whether a redeploy changes anything."""
    built = build_deployments(build_app(args), name="app", default_runtime_env={})
    return [
        (one.name, one._deployment_config.to_proto_bytes(), one._replica_config.to_proto_bytes())
        for one in built.deployments
    ]


def test_two_builds_are_equal(args: dict[str, object]) -> None:
    first = described(args)
    assert [name for name, *_ in first] == ["pool", "ingress"]
    assert described(args) == first


def test_a_bad_key_is_an_error(args: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unknown key servings"):
        build_app({**args, "servings": {}})


def test_limits_leave_room_for_our_own_admission(args: dict[str, object]) -> None:
    built = build_deployments(build_app(args), name="app", default_runtime_env={})
    limits = {one.name: one._deployment_config.max_ongoing_requests for one in built.deployments}
    assert limits["pool"] > 256
    assert limits["ingress"] > 256 / 3


def test_a_gpu_pool_reserves_one_bundle_a_shard(args: dict[str, object]) -> None:
    settings = load_settings({**args, "parallel": {"tensor_parallel_size": 4}}, Path.cwd())
    assert resolve_device(settings, {}) == "cuda"
    deployment = build_pool(settings, "cuda")._bound_deployment
    bundles = deployment._replica_config.placement_group_bundles
    assert [bundle["GPU"] for bundle in bundles] == [1.0] * 4
    assert bundles[0]["CPU"] > 2


@pytest.mark.parametrize(
    ("device", "resources", "resolved"),
    [("auto", {}, "cpu"), ("auto", {"GPU": 2.0}, "cuda"), ("cpu", {"GPU": 2.0}, "cpu"), ("cuda", {}, "cuda")],
)
def test_resolve_device(args: dict[str, object], device: str, resources, resolved: str) -> None:
    settings = load_settings({**args, "serving": {"device": device}}, Path.cwd())
    assert resolve_device(settings, resources) == resolved
