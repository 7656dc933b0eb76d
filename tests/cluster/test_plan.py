"""What a configuration takes of a cluster, and that the ready-made ones are right."""

from pathlib import Path

import pytest
import yaml

from hybridserve.cluster.cli.plan import print_plan
from hybridserve.cluster.plan import plan_pools
from hybridserve.cluster.serve_file import read_settings
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.footprint import measure_footprint

GIB = 2**30


@pytest.fixture
def shape(repo_root: Path) -> str:
    return str(repo_root / "configs" / "models" / "qwen3.5-9b.yaml")


def test_h200x8_fills_eight_gpus(repo_root: Path, shape: str) -> None:
    settings = read_settings(repo_root / "configs" / "h200x8.yaml")
    config = load_model_config(shape)
    short, long = plan_pools(settings, config, "cuda", 140 * GIB)
    assert (short.gpus, long.gpus) == ((4, 4), (4, 4))
    assert [len(one.placement.bundles) for one in (short, long)] == [1, 4]
    weights = measure_footprint(config, "bfloat16").weight_bytes
    assert short.fit.weight_bytes == weights
    assert short.fit.arena_bytes == int(0.9 * 140 * GIB) - weights
    # a sequence of the bucket's end and one of the whole context fit, many times
    assert [length for length, _ in short.fit.sequences] == [8192, 131072]
    assert all(count > 10 for one in (short, long) for _, count in one.fit.sequences)


def test_more_gpus_than_the_cap_are_told(repo_root: Path, shape: str, capsys) -> None:
    print_plan(repo_root / "configs" / "multi-node.yaml", shape, "141GB")
    out = capsys.readouterr().out
    assert "in sum: replicas 6 to 26, GPUs 8 to 44, never more than max_gpus 32" in out
    assert "0-4096" in out and "32769 and more" in out


def test_weights_that_do_not_fit_are_told(repo_root: Path, shape: str, capsys) -> None:
    print_plan(repo_root / "configs" / "h200x8.yaml", shape, "16GiB")
    assert "missing" in capsys.readouterr().out


def test_the_longest_sequence_is_the_smaller_of_context_and_arena(
    repo_root: Path, demo_model: Path, tmp_path: Path, capsys
) -> None:
    print_plan(repo_root / "configs" / "demo-pools.yaml", str(demo_model))
    out = capsys.readouterr().out
    # the arena of 256 MiB would hold many times as much
    assert out.count("2,048 tokens, by the context") == 2 and "by the arena" not in out

    content = yaml.safe_load((repo_root / "configs" / "demo-pools.yaml").read_text())
    args = content["applications"][0]["args"]
    args["serving"]["cache_memory"] = "3MiB"
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    settings, shape = read_settings(path), load_model_config(str(demo_model))
    fit = plan_pools(settings, shape, "cpu", None)[0].fit
    assert 0 < fit.longest < fit.context == 2048
    print_plan(path, str(demo_model))
    told = f"{fit.longest:,} tokens, by the arena (too few for max_context_length)"
    assert capsys.readouterr().out.count(told) == 2


def test_demo_pools_on_the_cpu(repo_root: Path, demo_model: Path, capsys) -> None:
    print_plan(repo_root / "configs" / "demo-pools.yaml", str(demo_model))
    out = capsys.readouterr().out
    assert "in sum: replicas 2, GPUs 0" in out
    assert "256 MiB" in out


def test_a_size_that_does_not_divide_is_named(repo_root: Path, shape: str, tmp_path: Path) -> None:
    content = yaml.safe_load((repo_root / "configs" / "h200x8.yaml").read_text())
    content["applications"][0]["args"]["pools"][1]["tensor_parallel_size"] = 3
    path = tmp_path / "three.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="pool long: tensor_parallel_size 3 does not divide the model"):
        print_plan(path, shape)
