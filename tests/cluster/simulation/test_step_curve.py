"""Curves go through what was measured, and say by how much they miss the rest."""

from pathlib import Path

import pytest

from hybridserve.cluster.simulation.build import sharded_curve
from hybridserve.cluster.simulation.step_curve import (
    CurveFile,
    curve_errors,
    fit_curve,
    interpolate,
    read_curve,
)
from hybridserve.replicas.models.config import load_model_config

POINTS = {
    "name": "by hand",
    "source": "nobody",
    "max_num_batched_tokens": 1000,
    "decode": {"context": 100, "step_ms": {1: 10, 11: 20}, "long_context": {1100: 15}},
    "first_token_ms": {100: 50, 1000: 140, 3000: 720},
}


def test_interpolation() -> None:
    points = ((1.0, 10.0), (3.0, 20.0), (4.0, 50.0))
    assert [interpolate(points, x) for x in (0, 1, 2, 3, 3.5, 4, 5)] == [10, 10, 15, 20, 35, 50, 80]
    assert interpolate(((5.0, 7.0),), 100) == 7


def test_a_curve_of_known_costs_is_found_again() -> None:
    curve = fit_curve(CurveFile.model_validate(POINTS))
    assert curve.decode_context_s == pytest.approx(5e-6)
    # three steps of 1,000 after 0, 1,000 and 2,000: 3 x 140 ms, and 300 ms for 3,000,000 pairs
    assert curve.prefill_context_s == pytest.approx(1e-7)
    assert curve.step_s(6, 600, 0) == pytest.approx(0.015)
    assert curve.step_s(6, 6600, 0) == pytest.approx(0.015 + 6000 * 5e-6)
    assert curve.step_s(0, 0, 550) == pytest.approx(0.095)
    # rows cost beside a prompt what they add to a step of their own
    assert curve.step_s(6, 600, 550) == pytest.approx(0.095 + 0.005)
    assert curve.step_s(0, 0, 550, 550 * 1000) == pytest.approx(0.095 + 0.055)
    assert all(by == pytest.approx(ms) for _, ms, by in curve_errors(CurveFile.model_validate(POINTS), curve))


def test_curves_of_this_repository_miss_their_points_by_little(repo_root: Path) -> None:
    files = sorted((repo_root / "configs" / "step-curves").glob("*.yaml"))
    assert files
    for path in files:
        file = read_curve(path)
        rows = curve_errors(file, fit_curve(file))
        assert len(rows) > 6
        for what, ms, by in rows:
            assert by == pytest.approx(ms, rel=0.05), (path.name, what)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "name"),
        ({"decode": {"context": 1, "step_ms": {}}}, "decode.step_ms"),
        ({"first_token_ms": {2000: 5}}, "needs a prompt of at most max_num_batched_tokens 1000, got 2000"),
        ({"first_token_ms": {10: -5}}, "first_token_ms.10"),
        ({"speed": 1}, "unknown key speed"),
    ],
)
def test_a_bad_file(change: dict[str, object], message: str, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "curve.yaml"
    path.write_text(yaml.safe_dump({**POINTS, **change}))
    with pytest.raises(ValueError, match=message):
        read_curve(path)


def test_shards_are_faster_but_not_by_their_number(repo_root: Path) -> None:
    file = read_curve(repo_root / "configs" / "step-curves" / "h200-qwen3.5-9b.yaml")
    curve = fit_curve(file)
    shape = load_model_config(repo_root / "configs" / "models" / "qwen3.5-9b.yaml")
    four = sharded_curve(curve, shape, 4)
    for rows in (1, 32, 256):
        assert 0.25 < four.decode_s(rows, 576 * rows) / curve.decode_s(rows, 576 * rows) < 1
    assert 0.25 < four.first_token_s(8192, 8192) / curve.first_token_s(8192, 8192) < 0.6
