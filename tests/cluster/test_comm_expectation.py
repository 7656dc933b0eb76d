"""The shares that docs/scaling.md states are the ones that its formulas give."""

import re
from pathlib import Path

import pytest

from hybridserve.cluster.comm_expectation import CASES, H200, RANKS, Machine, alone_s, share_of
from hybridserve.parallel.comm_benchmark.expectation import ASSUMED_NCCL, ASSUMED_ONE_SHOT
from hybridserve.replicas.models.config import load_model_config
from hybridserve.replicas.models.step_cost import StepCost

MODELS = ("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3-next-80b-a3b")


def test_a_step_is_products_and_then_mixers() -> None:
    machine = Machine("slow", bytes_per_s=10.0, flops=100.0, efficiency=0.5)
    bound_by_bytes = StepCost(20.0, 5.0, 15.0, 100.0, 10.0, ())
    bound_by_operations = StepCost(20.0, 5.0, 15.0, 500.0, 300.0, ())
    assert machine.seconds(bound_by_bytes) == (2.0 + 2.0) / 0.5
    assert machine.seconds(bound_by_operations) == (5.0 + 3.0) / 0.5
    assert 0.79 <= H200.efficiency <= 0.90


def test_the_speed_of_several_gpus_in_the_docs(repo_root: Path) -> None:
    config = load_model_config(repo_root / "configs" / "models" / "qwen3.5-27b.yaml")
    alone = alone_s(config, CASES[0])
    text = (repo_root / "docs" / "scaling.md").read_text()
    assert f"{alone * 1e3:.1f} ms on one GPU" in text
    for latencies in (ASSUMED_NCCL, ASSUMED_ONE_SHOT):
        steps = [share_of(config, CASES[0], n, "value_heads", latencies).step_s for n in RANKS]
        assert " / ".join(f"{alone / step:.2f}" for step in steps) in text


@pytest.mark.parametrize("model", MODELS)
def test_the_table_in_the_docs(repo_root: Path, model: str) -> None:
    config = load_model_config(repo_root / "configs" / "models" / f"{model}.yaml")
    rows = [
        [cell.strip() for cell in line.split("|")[2:-1]]
        for line in (repo_root / "docs" / "scaling.md").read_text().splitlines()
        if line.startswith(f"| {model} |")
    ]
    assert [row[0].replace(" 8,192", "") for row in rows] == [case[0] for case in CASES]
    for row, case in zip(rows, CASES, strict=True):
        found = [[float(number) for number in re.findall(r"[\d.]+", cell)] for cell in row[1:]]
        nccl = [share_of(config, case, n, "value_heads", ASSUMED_NCCL) for n in RANKS]
        one_shot = [share_of(config, case, n, "value_heads", ASSUMED_ONE_SHOT) for n in RANKS]
        assert found[0] == pytest.approx([s.compute_s * 1e3 for s in nccl], abs=0.006)
        assert found[1] == pytest.approx([s.share * 100 for s in nccl], abs=0.6)
        assert found[2] == pytest.approx([s.share * 100 for s in one_shot], abs=0.6)
        for times, strategy in zip(found[3:], ("gather_projections", "gather_state"), strict=True):
            others = [share_of(config, case, n, strategy, ASSUMED_NCCL) for n in RANKS]
            ratios = [other.step_s / ours.step_s for other, ours in zip(others, nccl, strict=True)]
            assert times == pytest.approx(ratios, abs=0.006)
