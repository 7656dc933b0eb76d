"""The load generator of tests/benchmarks, against a real ingress over a pool without an engine."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridserve.cluster.pool.interface import PoolBusy
from hybridserve.cluster.simulation.outcomes import Outcome


@pytest.fixture
def bench(repo_root: Path, monkeypatch: pytest.MonkeyPatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(repo_root / "tests" / "benchmarks"))
    import bench_serve

    return bench_serve


def make_load(bench, *arguments: str, context: int | None = 200):
    return bench.make_load(bench.options().parse_args(["--url", "http://nowhere", *arguments]), context)


def test_loads_are_as_the_options_say(bench) -> None:
    load = make_load(bench, "--num-requests", "50", "--scale", "0.1", "--time-scale", "2")
    assert len(load) == 50 and load[1].at_s == pytest.approx(2 * 0.052, abs=1e-4)
    assert all(one.length <= 200 for one in load) and load[2].prompt_tokens == 11
    timed = make_load(bench, "--rate", "20", "--duration", "10", "--seed", "3")
    assert 150 < len(timed) < 250 and timed[-1].at_s < 10
    assert timed == make_load(bench, "--rate", "20", "--duration", "10", "--seed", "3")
    assert timed != make_load(bench, "--rate", "20", "--duration", "10", "--seed", "4")
    mixed = make_load(bench, "--num-requests", "100", "--priority", "high=1,low=1", "--max-tokens", "3")
    assert {one.priority for one in mixed} == {"high", "low"}
    assert max(one.answer_tokens for one in mixed) == 3
    for wrong in (["--rate", "3"], ["--num-requests", "0"], ["--duration", "-1"], ["--time-scale", "0"]):
        with pytest.raises(ValueError, match="must be|needs --num-requests or --duration"):
            make_load(bench, *wrong)


def test_prompts_have_exact_lengths_and_no_special_tokens(bench, tokenizer) -> None:
    prompts = bench.Prompts(tokenizer, 1)
    one, other = prompts(300), prompts(300)
    assert len(one) == len(other) == 300 and one[:16] != other[:16]
    assert not any(tokenizer.is_special(token) for token in one)
    assert bench.Prompts(tokenizer, 1)(300) == one


def test_events_cut_anywhere(bench) -> None:
    from serve.client import _Stream

    text = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":2}}\n\n'
    for size in (1, 7, len(text)):
        stream = _Stream()
        for at in range(0, len(text), size):
            stream.take(text[at : at + size], float(at))
        stream.take(b"data: [DONE]\n\n", 99.0)
        assert stream.done and stream.tokens == 2 and len(stream.times) == 1 and stream.error is None
    stream.take(b'data: {"error":{"code":"engine_error","message":"NaN"}}\n\n', 100.0)
    assert stream.error == "error event engine_error"


def test_a_load_over_http(bench, serve: Callable[..., int], pool, demo_model: Path, tmp_path: Path) -> None:
    """From the command line to the files; every answer's tokens are counted."""
    pool.text = " a b c d e f g h"
    pool.step_seconds = 0.002
    url = f"http://127.0.0.1:{serve()}"
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    command = [sys.executable, bench.__file__, "--url", url, "--tokenizer", demo_model, "--rate", "100"]
    command += ["--num-requests", "30", "--scale", "0.02", "--max-tokens", "5", "--context", "256"]
    command += ["--buckets", "40", "--json", out, "--plot", plot]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = json.loads(out.read_text())["runs"]["server"]
    short, long, every = run["figures"]["buckets"]
    assert (short["name"], long["name"], every["name"]) == ("0-40", "41 and more", "all")
    assert short["requests"] + long["requests"] == every["requests"] == every["ok"] == 30
    # three more came before, to warm up
    asked = {(len(one.prompt_token_ids), one.params.max_tokens) for one in pool.submitted[3:]}
    assert asked == {(one["prompt_tokens"], one["tokens"]) for one in run["requests"]}
    for one in run["requests"]:
        assert 0 < one["first_token_s"] <= one["end_s"]
    assert every["ttft"]["p50"] > 0.002 and run["client"]["late"]["count"] == 30
    assert "client: p99 sent" in done.stdout and plot.stat().st_size > 0


def test_refusals_and_failures_are_told_apart(bench, serve: Callable[..., int], pool, tokenizer) -> None:
    pool.text = " a b c d"
    url = f"http://127.0.0.1:{serve()}"
    arrival = bench.workload.Arrival(0.0, 8, 3, "low")

    def end_of(failures: dict[int, Exception], **of_pool: object) -> str:
        pool.failures = failures
        for name, value in of_pool.items():
            setattr(pool, name, value)
        target = bench.Target(url, "demo", api_key="secret", timeout_s=2.0)
        [outcome] = asyncio.run(bench.drive(target, [arrival], bench.Prompts(tokenizer, 1))).outcomes
        return outcome.end

    assert end_of({}) == "ok" and pool.submitted[-1].priority == "low"
    assert end_of({0: PoolBusy("full", 3, "token_budget")}) == "429 token_budget"
    assert end_of({}, engine_error_at=2).startswith("error event engine_error")
    assert end_of({}, engine_error_at=None, stuck_at=1) == "timeout"


def test_latency_counts_from_when_a_request_was_to_be_sent(bench, serve, pool, tokenizer) -> None:
    """A client that stood still for half a second must not hide it."""
    pool.text = " a b c d"
    arrivals = [bench.workload.Arrival(0.05 * at, 8, 2) for at in range(4)]
    stood_still = []

    async def block() -> None:
        await asyncio.sleep(0.25)
        time.sleep(0.6)
        stood_still.append(True)

    async def both() -> object:
        blocker = asyncio.create_task(block())
        target = bench.Target(f"http://127.0.0.1:{serve()}", "demo")
        measured = await bench.drive(target, arrivals, bench.Prompts(tokenizer, 1))
        await blocker
        return measured

    measured = asyncio.run(both())
    assert stood_still and max(measured.late_s) > 0.3
    assert max(one.first_token_s for one in measured.outcomes) > 0.3
    found = bench.figures(measured.outcomes, [], bench.Slo(1.0, 1.0))
    assert bench.client_report(measured, found).bottleneck is not None


def test_a_client_that_keeps_up_is_no_bottleneck(bench) -> None:
    measured = bench.Measured(late_s=[0.001] * 100, loop_delay_s=[0.001] * 100, cpu_share=0.3)
    measured.outcomes = [Outcome(0.0, 10, 5, 5, 0.2, 0.4)]
    found = bench.figures(measured.outcomes, [], bench.Slo(1.0, 1.0))
    report = bench.client_report(measured, found)
    assert report.bottleneck is None and "BOTTLENECK" not in report.line()
    measured.cpu_share = 0.95
    assert "it used 95% of one core" in bench.client_report(measured, found).line()


def test_what_it_refuses(bench) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, bench.__file__, *arguments], capture_output=True, text=True)

    assert "--url needs --tokenizer" in run("--url", "http://x").stderr
    assert "--compare needs --config" in run("--url", "http://x", "--compare").stderr
