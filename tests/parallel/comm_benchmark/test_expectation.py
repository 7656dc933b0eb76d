import json
import math
from pathlib import Path

import pytest

from hybridserve.parallel.comm_benchmark.expectation import (
    ASSUMED_NCCL,
    AssumedLatencies,
    MeasuredLatencies,
    Share,
    expected_share,
    read_latencies,
)

SMALL = MeasuredLatencies({("all_reduce", 2): ((1024, 10e-6), (4096, 40e-6))})


def test_assumed_latency_is_fixed_time_and_bytes() -> None:
    latencies = AssumedLatencies({4: 5e-6}, 100e9)
    assert latencies.seconds("all_reduce", 10**6, 4) == pytest.approx(5e-6 + 15e-6)
    assert latencies.seconds("all_gather", 10**6, 4) == pytest.approx(5e-6 + 7.5e-6)
    with pytest.raises(ValueError, match="ranks must be one of 2, 4, 8, got 3"):
        ASSUMED_NCCL.seconds("all_reduce", 1, 3)


@pytest.mark.parametrize(
    ("size", "seconds"), [(1, 10e-6), (1024, 10e-6), (2048, 20e-6), (4096, 40e-6), (8192, 80e-6)]
)
def test_measured_latency_between_and_beyond_the_sizes(size, seconds) -> None:
    assert SMALL.seconds("all_reduce", size, 2) == pytest.approx(seconds)


def test_what_was_not_measured_is_refused() -> None:
    assert SMALL.ranks == (2,)
    with pytest.raises(ValueError, match="nothing was measured for all_gather at 2 ranks"):
        SMALL.seconds("all_gather", 1, 2)


def test_share_and_what_overlap_gives() -> None:
    share = expected_share(30e-6, [("all_reduce", 3, 1024), ("all_reduce", 1, 4096)], 2, SMALL)
    assert (share.compute_s, share.communication_s) == (30e-6, pytest.approx(70e-6))
    assert share.share == pytest.approx(0.7) and share.overlap_gain == pytest.approx(0.3)
    assert Share(1.0, 0.0).share == 0.0


def row(collective: str, mode: str, size: int, p50_us: float) -> dict[str, object]:
    return {"collective": collective, "mode": mode, "ranks": 2, "bytes": size, "times": {"p50_us": p50_us}}


def test_reports_give_the_fastest_graph_of_each_size(tmp_path: Path) -> None:
    rows = [row(c, "graph", 1024, 7.0) for c in ("all_gather", "reduce_scatter")]
    rows += [row("all_reduce", "graph", size, us) for size, us in ((2048, 9.0), (1024, 8.0), (1024, 5.0))]
    rows += [row("all_reduce", "eager", 1024, 1.0)]
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"collectives": rows}))
    latencies = read_latencies([file])
    known = latencies.points["all_reduce", 2]
    assert [size for size, _ in known] == [1024, 2048]
    assert all(math.isclose(got, us / 1e6) for (_, got), us in zip(known, (5.0, 9.0), strict=True))


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"collectives": []}'])
def test_what_is_no_report_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(ValueError, match="other.json"):
        read_latencies([file])
