"""`hybridserve simulate`: figures, sweeps, and errors in a line."""

import json
from pathlib import Path

import pytest

OPTIONS = ("--rate", "4", "--num-requests", "200", "--scale", "0.1", "--device", "cpu")


@pytest.fixture
def given(repo_root: Path) -> list[str]:
    curve = repo_root / "configs" / "step-curves" / "h200-qwen3.5-9b.yaml"
    trace = repo_root / "tests" / "benchmarks" / "traces" / "azure_llm_2023_code_sample.csv"
    return [str(repo_root / "configs" / "demo-pools.yaml"), "--curve", str(curve), "--trace", str(trace)]


def test_pools_beside_one(hybridserve, given: list[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    done = hybridserve("simulate", *given, *OPTIONS, "--compare", "--json", str(out), "--plot", str(plot))
    assert done.code == 0, done.err
    assert "events" in done.out and "257 and more" in done.out
    found = json.loads(out.read_text())
    assert set(found) == {"pools", "merged"}
    for run in found.values():
        assert run["buckets"][-1]["requests"] == 200 and run["tokens_per_s"] > 0
    assert plot.read_text().startswith("<?xml")


def test_a_sweep(hybridserve, given: list[str], tmp_path: Path) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.svg"
    done = hybridserve(
        "simulate", *given, *OPTIONS, "--sweep-cuts", "60,200", "--json", str(out), "--plot", str(plot)
    )
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    assert [way["cut"] for way in found["ways"]] == [None, 60, 200] and found["best"] in found["ways"]
    assert f"cut at {found['best']['cut']}, 1 replicas below and 1 above" in done.out
    assert plot.stat().st_size > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "device must be cuda or cpu, got 'tpu'"),
        (["--rate", "0"], "rate must be a positive number, got 0"),
        (["--sweep-cuts", "a,b"], "sweep_cuts must be whole numbers like 512,1024, got 'a,b'"),
        (["--priority", "urgent"], "priority must be one of high, normal, low, got 'urgent'"),
        (["--plot", "figure.txt"], "plot must end in"),
        (["--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["--replicas", "0"], "replicas is read with --sweep-cuts only, got 0"),
        (["--short", "0"], "short is read with --sweep-cuts only, got 0"),
        (
            ["--sweep-cuts", "60", "--replicas", "0"],
            "replicas must be at least 2 to be shared by two buckets, got 0",
        ),
        (["--sweep-cuts", "60", "--short", "0"], "short must be a positive length, got 0"),
    ],
)
def test_what_it_refuses(hybridserve, given: list[str], options: list[str], message: str) -> None:
    done = hybridserve("simulate", *given, *options)
    assert done.code == 1 and message in done.err
