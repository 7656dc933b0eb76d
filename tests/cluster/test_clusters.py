"""The files for Ray's cluster launcher and for KubeRay, as their readers take them."""

import re
import warnings
from pathlib import Path

import pytest
import yaml

from hybridserve.cluster.serve_alpha.proxy_mode import environment
from hybridserve.cluster.serve_file import BUILDER
from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import parse_settings

# of KubeRay's v1 types (apis/ray/v1/*_types.go); the CRD drops or refuses others
SERVICE = {
    "serveConfigV2",
    "rayClusterConfig",
    "serveService",
    "upgradeStrategy",
    "excludeHeadPodFromServeSvc",
}
CLUSTER = {
    "rayVersion",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
    "headServiceAnnotations",
    "gcsFaultToleranceOptions",
    "suspend",
}
GROUP = {"rayStartParams", "template"}
WORKERS = GROUP | {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "scaleStrategy"}


def check_with_ray(config: dict) -> dict:
    """What the launcher makes of it; raises where it would refuse."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray.autoscaler._private.util import prepare_config, validate_config

        prepared = prepare_config(config)
        validate_config(prepared)
    return prepared


@pytest.fixture(scope="module")
def launcher(repo_root: Path) -> str:
    return (repo_root / "ray_cluster.yaml").read_text()


def test_the_launchers_file_is_what_ray_takes(launcher: str, repo_root: Path) -> None:
    config = yaml.safe_load(launcher)
    prepared = check_with_ray(config)
    assert prepared["provider"]["head_ip"] == "127.0.0.1"
    [node_type] = prepared["available_node_types"]
    assert prepared["head_node_type"] == node_type
    commands = "\n".join(
        [*config["setup_commands"], *config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    )
    for named in re.findall(r"(scripts/\S+|constraints\.txt)", commands):
        assert (repo_root / named).is_file()
    # the launcher itself passes no password on
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert commands.count("RAY_AUTH_MODE=token") == commands.count("ray start") == 2


def test_its_cloud_is_too(launcher: str) -> None:
    """With the comments taken away, in place of the local provider."""
    local, cloud = launcher.split("# ---- a cloud ----")
    lines = cloud[cloud.index("# provider:") :].splitlines()
    clouds = yaml.safe_load("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))
    config = {
        key: value
        for key, value in yaml.safe_load(local).items()
        if key not in ("provider", "auth", "min_workers", "max_workers")
    }
    prepared = check_with_ray({**config, **clouds})
    assert prepared["available_node_types"]["h200x8"]["resources"] == {"CPU": 192, "GPU": 8}
    workers = prepared["available_node_types"]["h200x8"]["max_workers"]
    assert workers <= prepared["max_workers"]


def test_serves_variables_are_the_same_wherever_it_is_started(launcher: str, repo_root: Path) -> None:
    for name, value in environment("serve", Path(), 600, 256).items():
        assert launcher.count(f"{name}={value}") == 2
    service = yaml.safe_load((repo_root / "configs" / "kuberay-rayservice.yaml").read_text())
    for container in containers(service):
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert environment("serve", Path(), 600, 256).items() <= env.items()


def containers(service: dict) -> list[dict]:
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.fixture(scope="module")
def service(repo_root: Path) -> dict:
    return yaml.safe_load((repo_root / "configs" / "kuberay-rayservice.yaml").read_text())


@pytest.fixture(scope="module")
def settings(service: dict) -> AppSettings:
    from ray.serve.schema import ServeDeploySchema

    content = yaml.safe_load(service["spec"]["serveConfigV2"])
    deploy = ServeDeploySchema.model_validate(content)
    [application] = deploy.applications
    assert application.import_path == BUILDER
    return parse_settings(application.args)


def test_kuberays_manifest_has_the_fields_that_kuberay_knows(service: dict) -> None:
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    assert spec.keys() <= SERVICE and cluster.keys() <= CLUSTER
    assert cluster["headGroupSpec"].keys() <= GROUP
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        for container in group["template"]["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["livenessProbe"] and container["readinessProbe"]
            assert container["resources"]["limits"] == container["resources"]["requests"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        # Kubernetes takes nothing but strings there
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_its_ray_is_the_one_this_project_needs(service: dict) -> None:
    import ray

    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


def test_its_pools_fit_its_nodes(service: dict, settings: AppSettings) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    [group] = cluster["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert int(group["rayStartParams"]["num-gpus"]) == gpus
    pools = settings.pool_specs()
    least = sum(pool.replicas.min * pool.tensor_parallel_size for pool in pools)
    assert least <= gpus * group["minReplicas"]
    assert settings.autoscaling.max_gpus == gpus * group["maxReplicas"]
    # nothing to spare, so an update must not wait for it
    assert all(settings.serving_of(pool.name).max_surge_percent == 0 for pool in pools)
    grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > settings.serving.longest_answer_s


def test_its_ports_are_serves(service: dict) -> None:
    http = yaml.safe_load(service["spec"]["serveConfigV2"])["http_options"]
    for container in containers(service):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == http["port"]
