"""The whole benchmark on gloo processes."""

import multiprocessing
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest

from hybridserve.parallel.comm_benchmark.launch import run_local
from hybridserve.parallel.comm_benchmark.schema import REPORT_SCHEMA
from hybridserve.parallel.comm_benchmark.settings import LayerShape

# fewer value heads than ranks, so that ways that cut those do not fit
SHAPE = LayerShape("tiny", hidden_size=32, num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=16)


@pytest.fixture(scope="module")
def report(tiny_settings):
    return run_local(tiny_settings(4, layer=SHAPE, sizes=(1024, 4100)))


def test_the_report_keeps_its_schema(report) -> None:
    jsonschema.validate(report, REPORT_SCHEMA)
    assert report["environment"]["switches"]["NCCL_NVLS_ENABLE"] == "0"
    assert set(report["not_measured"].values()) == {"the ranks share no memory"}


def test_every_collective_and_size_is_there(report) -> None:
    rows = report["collectives"]
    assert {(row["collective"], row["bytes"]) for row in rows if not row["label"]} == {
        (collective, size)
        for collective in ("all_reduce", "all_gather", "reduce_scatter")
        # a message is a whole number of elements for every rank
        for size in (1024, 4096)
    }
    assert {row["ranks"] for row in rows} == {4} and {row["implementation"] for row in rows} == {
        "gloo",
        "gloo_rms_norm",
    }
    labels = {row["label"] for row in rows if row["collective"] == "all_reduce"}
    assert labels == {"", "hidden x 1", "hidden x 32"}
    for row in rows:
        times = row["times"]
        assert 0 < times["p50_us"] <= times["p90_us"] <= times["p99_us"] and times["replays"] == 3
        factor = 1.5 if row["collective"] == "all_reduce" else 0.75
        assert row["busbw_gbps"] == pytest.approx(factor * row["bytes"] / times["p50_us"] / 1e3)


def test_strategies_that_do_not_fit_say_why(report) -> None:
    rows = [row for row in report["strategies"] if "unavailable" in row]
    names = ("value_heads", "value_heads_in_parts", "gather_state")
    assert {(row["strategy"], row["ranks"]) for row in rows} == {(name, 4) for name in names}
    assert {row["unavailable"] for row in rows} == {"4 ranks do not divide num_v_heads 2; these do: 1, 2"}


def test_bytes_of_the_strategies_are_counted_at_the_group(report) -> None:
    """n ranks: an all-reduce sends 2(n-1)/n, a gather (n-1)/n of the message; only one moves states."""
    shape = SHAPE
    rows = [row for row in report["strategies"] if "unavailable" not in row]
    # the chain is of a prefill on two ranks
    assert {row["ranks"] for row in rows} == {1, 2, 4} and len(rows) == 2 * (3 * 4 - 2) + 1
    hidden, projected = 4 * shape.hidden_size, 4 * shape.projected_width
    for row in rows:
        n, tokens = row["ranks"], row["tokens"]
        gathered = (n - 1) / n * (projected + hidden)
        state = (n - 1) / n * row["sequences"] * shape.state_bytes
        expected = {
            "value_heads": 2 * (n - 1) / n * hidden,
            "head_v_dim": 2 * (n - 1) / n * (hidden + 4 * shape.num_v_heads),
            "gather_projections": gathered,
            "gather_state": gathered + state / tokens,
        }
        expected["value_heads_in_parts"] = expected["value_heads"]
        if n == 1:
            expected["head_v_dim"] = 0.0
        assert row["wire_bytes_per_token"] == pytest.approx(expected[row["strategy"]]), row
        assert row["state_wire_bytes"] == (state if row["strategy"] == "gather_state" else 0)
        kept = n if row["strategy"] != "gather_projections" else 1
        assert row["state_bytes_per_rank"] == row["sequences"] * shape.state_bytes / kept
        assert row["max_relative_error"] <= 1e-5


def test_a_rank_that_dies_is_named_and_the_others_are_ended(tiny_settings) -> None:
    long = tiny_settings(2, min_replays=10**6, max_replays=10**6)
    ended: list[BaseException] = []

    def run() -> None:
        try:
            run_local(long)
        except ChildProcessError as error:
            ended.append(error)

    runner = threading.Thread(target=run)
    runner.start()
    deadline = time.monotonic() + 60
    while len(multiprocessing.active_children()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    multiprocessing.active_children()[0].kill()
    runner.join(60)
    assert not runner.is_alive() and multiprocessing.active_children() == []
    assert "died with exit status -9" in str(ended[0])


RUN_AND_SHOW_RANKS = """
import multiprocessing, sys, threading, time
from hybridserve.parallel.comm_benchmark.launch import run_local
from hybridserve.parallel.comm_benchmark.settings import *

if __name__ == "__main__":
    layer = LayerShape("tiny", 32, 2, 4, 8, 16)
    endless = BenchmarkSettings(
        layer, "float32", "gloo", 2, (1024,), (Case("decode", 1),), min_replays=10**7, max_replays=10**7
    )
    threading.Thread(target=run_local, args=(endless,), daemon=True).start()
    while len(multiprocessing.active_children()) < 2:
        time.sleep(0.05)
    time.sleep(1.0)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def test_ranks_end_with_whoever_started_them(tmp_path: Path) -> None:
    """Even one that was killed."""
    script = tmp_path / "run.py"
    script.write_text(RUN_AND_SHOW_RANKS)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        ranks = [Path("/proc") / pid for pid in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    assert len(ranks) == 2
    deadline = time.monotonic() + 30
    while any(rank.exists() for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [rank for rank in ranks if rank.exists()] == []


def test_nccl_needs_a_gpu_for_every_rank(tiny_settings) -> None:
    with pytest.raises(ValueError, match="tp 64 with nccl needs as many GPUs, and this process sees"):
        run_local(tiny_settings(64, backend="nccl"))
