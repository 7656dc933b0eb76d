"""Cuts are tried as asked and the best is the best; pools are merged as told."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.simulation.build import Assumptions, cluster_model
from hybridserve.cluster.simulation.merging import merged_pools
from hybridserve.cluster.simulation.step_curve import StepCurve
from hybridserve.cluster.simulation.sweep import Way, best_way, sweep_cuts
from hybridserve.cluster.simulation.workload import Arrival
from hybridserve.replicas.models.config import load_model_config

CURVE = StepCurve("by hand", ((1, 0.01), (16, 0.02)), ((1, 0.01), (100, 0.02), (2048, 0.4)))
ARGS = {"model": {"path": "nowhere"}, "serving": {"max_batch_size": 16}}


def load(count: int) -> list[Arrival]:
    rng = random.Random(1)
    return [Arrival(0.05 * at, rng.choice([20, 20, 20, 3000]), 10) for at in range(count)]


def test_buckets_keep_short_requests_from_long_ones() -> None:
    seen: list[Way] = []
    swept = sweep_cuts(
        ARGS,
        lambda settings: cluster_model(settings, CURVE, Assumptions(device="cpu")),
        load(600),
        [100, 5000],
        replicas=4,
        on_way=seen.append,
    )
    assert list(swept.ways) == seen and swept.short == 100
    assert [(way.cut, way.short_replicas, way.long_replicas) for way in swept.ways] == [
        (None, 4, 0),
        *((cut, count, 4 - count) for cut in (100, 5000) for count in (1, 2, 3)),
    ]
    merged, best = swept.ways[0], swept.best
    assert best is not None and best.cut == 100
    assert best.short_p99_s < merged.short_p99_s / 2 and best.tokens_per_s > 0.95 * merged.tokens_per_s
    # a cut above all lengths leaves the long pool empty
    assert all(way.long_p99_s is None for way in swept.ways if way.cut == 5000)


def test_the_best_keeps_above_the_floor() -> None:
    merged = Way(None, 4, 0, 100.0, 1.0, 0.5, 1.0, 1.0, 1.0, None, None, 2.0)
    fast = replace(merged, cut=10, short_p99_s=0.1, tokens_per_s=94.0)
    good = replace(merged, cut=20, short_p99_s=0.2, tokens_per_s=95.0)
    slow = replace(merged, cut=30, short_p99_s=0.3, tokens_per_s=100.0)
    assert best_way([merged, fast, good, slow], 0.95) is good
    assert best_way([merged, fast, good, slow], 0.9) is fast
    assert best_way([merged, fast], 0.95) is None
    kind = replace(good, cut=40, short_p99_s=0.24, all_p99_s=1.9)
    assert best_way([merged, good, kind, slow], 0.95) is kind
    assert best_way([merged, good, replace(kind, short_p99_s=0.26)], 0.95) is good


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cuts": [100], "replicas": 1}, "replicas must be at least 2 to be shared by two buckets, got 1"),
        ({"cuts": [0], "replicas": 2}, r"cuts must be positive lengths, got \[0\]"),
        ({"cuts": [], "replicas": 2}, "cuts must be positive"),
    ],
)
def test_bad_sweeps(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep_cuts(ARGS, lambda settings: pytest.fail("run"), load(1), **options)


def test_pools_merged(repo_root: Path) -> None:
    content = yaml.safe_load((repo_root / "configs" / "demo-pools.yaml").read_text())
    args = content["applications"][0]["args"]
    [spec] = AppSettings.model_validate(merged_pools(args)).pool_specs()
    assert (spec.name, spec.replicas.min, spec.replicas.max) == ("merged", 2, 2)
    assert spec.max_prompt_tokens is None and spec.limits.token_budget == 16384
    settings = AppSettings.model_validate(merged_pools(args))
    assert settings.serving_of("merged").max_batch_size == 16
    assert len(args["pools"]) == 2, "the original was changed"
    with pytest.raises(ValueError, match="merging takes two at least, got 0"):
        merged_pools(ARGS)
    args["pools"][1]["tensor_parallel_size"] = 2
    with pytest.raises(ValueError, match="must have one tensor_parallel_size, got 1, 2"):
        merged_pools(args)


def test_a_configuration_of_gpus(repo_root: Path) -> None:
    """Memory comes from the shape, shards are reckoned from it, and pools scale by the YAML's rule."""
    content = yaml.safe_load((repo_root / "configs" / "multi-node.yaml").read_text())
    settings = AppSettings.model_validate(content["applications"][0]["args"])
    with pytest.raises(ValueError, match="pool medium: tensor_parallel_size 2 needs --model"):
        cluster_model(settings, CURVE, Assumptions())
    shape = load_model_config(repo_root / "configs" / "models" / "qwen3.5-9b.yaml")
    model = cluster_model(settings, CURVE, Assumptions(shape=shape, gpu_bytes=141 * 10**9))
    short, medium, long = model.pools
    assert model.num_ingress == 8
    assert short.scaling.max_gpus == 32 and short.scaling.rule.max_replicas == 16
    assert (medium.claimed_gpus, long.claimed_gpus, long.scaling.gpus_per_replica) == (4.0, 0.0, 4.0)
    assert short.engine.overlaps and short.engine.max_num_batched_tokens == 8192
    # some 100 GB at 32 KiB a token; a unit of 51.9 MB or more is 1,584 tokens at least
    assert 3e6 < short.engine.arena_tokens < 4e6 and 1584 < short.engine.unit_tokens < 2000
    assert long.engine.curve.decode_s(1, 0) < short.engine.curve.decode_s(1, 0)
    with pytest.raises(ValueError, match="pool short: the weights do not fit"):
        cluster_model(settings, CURVE, Assumptions(shape=shape, gpu_bytes=10 * 10**9))
