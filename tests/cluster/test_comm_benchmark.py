"""The benchmark as a Ray job, its ranks in bundles of a placement group."""

import jsonschema
import pytest

from hybridserve.parallel.comm_benchmark.schema import REPORT_SCHEMA
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings, Case, LayerShape

pytestmark = pytest.mark.usefixtures("ray_instance")


def settings(tp_size: int, backend: str = "gloo") -> BenchmarkSettings:
    layer = LayerShape("tiny", hidden_size=32, num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=16)
    few = {"sizes": (1024,), "max_bytes": 1024, "min_replays": 2, "max_replays": 2}
    return BenchmarkSettings(
        layer=layer, dtype="float32", backend=backend, tp_size=tp_size, cases=(Case("decode", 2),), **few
    )


def test_a_rank_in_each_bundle() -> None:
    import ray

    from hybridserve.cluster.comm_benchmark import connected, run_on_cluster

    free = ray.available_resources()["CPU"]
    with connected("auto"):
        report = run_on_cluster(settings(2))
    jsonschema.validate(report, REPORT_SCHEMA)
    assert len(report["environment"]["nodes"]) == 2
    assert {row["ranks"] for row in report["strategies"]} == {1, 2}
    assert {row["implementation"] for row in report["collectives"]} == {"gloo", "gloo_rms_norm"}
    assert ray.is_initialized()
    assert ray.available_resources()["CPU"] <= free


@pytest.mark.parametrize(("tp_size", "backend"), [(64, "gloo"), (2, "nccl")])
def test_ranks_that_find_no_room_are_refused(tp_size: int, backend: str) -> None:
    from hybridserve.cluster.comm_benchmark import run_on_cluster

    with pytest.raises(ValueError, match=rf"tp {tp_size} needs {tp_size} bundles of .* had no room; it has"):
        run_on_cluster(settings(tp_size, backend), placement_timeout_s=0.5)
