"""The application builder: the same settings give the same deployments."""

from pathlib import Path

import pytest
from ray.serve._private.build_app import build_app as build_deployments

from hybridserve.cluster.app import build_app, resolve_device
from hybridserve.cluster.settings_reading import load_settings


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


def test_every_pool_is_a_deployment_with_a_bundle_for_each_shard(demo_model: Path) -> None:
    pools = [
        {"name": "short", "max_prompt_tokens": 100, "replicas": 3},
        {"name": "long", "tensor_parallel_size": 4, "replicas": {"min": 0, "max": 2}},
    ]
    args = {"model": {"path": str(demo_model)}, "serving": {"device": "cuda"}, "pools": pools}
    built = build_deployments(build_app(args), name="app", default_runtime_env={})
    short, long, ingress = built.deployments
    assert [short.name, long.name, ingress.name] == ["pool-short", "pool-long", "ingress"]
    assert short._deployment_config.num_replicas == 3
    scaling = long._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (0, 2)
    assert scaling.policy.policy_kwargs["claims"] == {"short": 3.0, "long": 0.0}
    for one, tp_size in ((short, 1), (long, 4)):
        config = one._replica_config
        assert [bundle["GPU"] for bundle in config.placement_group_bundles] == [1.0] * tp_size
        assert config.placement_group_bundles[0]["CPU"] > 2
        assert config.placement_group_strategy == "STRICT_PACK"
    assert described(args) == described(args)


def test_shards_that_do_not_divide_the_model_are_named(demo_model: Path) -> None:
    pools = [{"name": "short", "max_prompt_tokens": 9}, {"name": "long", "tensor_parallel_size": 3}]
    with pytest.raises(ValueError, match="pool long: tensor_parallel_size 3 does not divide the model: .*8"):
        build_app({"model": {"path": str(demo_model)}, "pools": pools})


@pytest.mark.parametrize(
    ("device", "resources", "resolved"),
    [("auto", {}, "cpu"), ("auto", {"GPU": 2.0}, "cuda"), ("cpu", {"GPU": 2.0}, "cpu"), ("cuda", {}, "cuda")],
)
def test_resolve_device(args: dict[str, object], device: str, resources, resolved: str) -> None:
    settings = load_settings({**args, "serving": {"device": device}}, Path.cwd())
    assert resolve_device(settings, resources) == resolved


@pytest.mark.parametrize(
    ("serving", "per_node"),
    [
        ({"device": "cuda"}, 3),
        ({"device": "cpu"}, None),
        ({"device": "cpu", "spare_processes": True}, 3),
        ({"device": "cuda", "spare_processes": False}, None),
    ],
)
def test_spare_processes_are_enough_for_one_replica(demo_model: Path, serving, per_node: int | None) -> None:
    parallel = {"tensor_parallel_size": 2}
    args = {"model": {"path": str(demo_model)}, "serving": serving, "parallel": parallel}
    pool, _ = build_deployments(build_app(args), name="app", default_runtime_env={}).deployments
    _, options = pool.init_args
    assert (None if options.spares is None else options.spares.per_node) == per_node
