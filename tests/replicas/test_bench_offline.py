"""The offline benchmark runs from end to end on a CPU, and reads a GPU's trace rightly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(repo_root: Path) -> Path:
    return repo_root / "tests" / "benchmarks" / "bench_offline.py"


@pytest.fixture
def modules(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark's own modules can be imported."""
    monkeypatch.syspath_prepend(str(repo_root / "tests" / "benchmarks" / "offline"))


def test_every_row_is_measured_and_kept(script: Path, demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, script, "--shape", demo_model, "--quick", "--device", "cpu", "--fill"]
    command += ["--cache-memory-bytes", str(2**25), "--num-threads", "1", "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["start to ready"]["value"] < rows["start and first lengths, warm"]["value"]
    # differences of short runs may be anything, the median step may not
    differences = ("TPOT", "temperature")
    assert all(row["value"] > 0 for row in rows.values() if not row["name"].startswith(differences))
    assert rows["TPOT 4"]["notes"]["median step of the device, ms"] > 0 and len(rows["TPOT 4"]["runs"]) == 2
    capacity = rows["capacity 256"]
    # the last may have to wait for the pages by which the others grew
    assert capacity["notes"]["allocated"] - 2 <= capacity["value"] <= capacity["notes"]["allocated"]
    assert capacity["value"] * 16 > 32
    assert rows["inter-token p99"]["goal"]["ours"] > 0 and "verdict" in rows["inter-token p99"]
    for profile in found["profiles"].values():
        assert {"linear_attn.mix", "self_attn.project_in", "mlp", "lm_head"} <= set(profile["parts_ms"])
    names = {"profile of a decode step of 3", "profile of a prefill", "profile of 2 mixed steps"}
    assert set(found["profiles"]) == names
    for name in (*rows, *names):
        assert name in done.stdout


def test_ranks_beside_an_earlier_run(script: Path, demo_model: Path, tmp_path: Path) -> None:
    out, earlier = tmp_path / "out.json", tmp_path / "earlier.json"
    about = {"model": str(demo_model), "sizes": "quick", "device": "another"}
    earlier.write_text(json.dumps({"about": about, "rows": [{"name": "capacity 256", "value": 21.0}]}))
    command = [sys.executable, script, "--shape", demo_model, "--quick", "--device", "cpu", "--json", out]
    command += ["--tensor-parallel-size", "2", "--cache-memory-bytes", str(2**25), "--against", earlier]
    command += ["--only", "capacity|TTFT 32|profile of a prefill"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert found["about"]["tensor_parallel_size"] == 2 and set(rows) == {"capacity 256", "TTFT 32"}
    assert rows["TTFT 32"]["value"] > 0 and "against" not in rows["TTFT 32"]
    # half of each sequence's memory a rank
    assert 1.8 < rows["capacity 256"]["against"]["speedup"] < 2.2
    assert list(found["skipped"]) == ["profile of a prefill"] and found["profiles"] == {}
    assert "compared with a run of device another, this one's is cpu" in done.stdout


def test_goals_of_ranks(modules: None, tmp_path: Path) -> None:
    from baseline import Baseline
    from rows import Measured

    file = tmp_path / "one.json"
    rows = [{"name": "TPOT 1", "value": 12.0}, {"name": "mixed", "error": "failed"}]
    about = {"model": "configs/models/qwen3.5-27b.yaml", "sizes": "full", "state_dtype": "float32"}
    about |= {"device": "a", "torch": "1", "date": "today"}
    file.write_text(json.dumps({"about": about, "rows": rows}))
    compared = Baseline(file, about, "27b", 2).compare("TPOT 1", Measured(8.0, "ms"))
    assert compared.line("ms", 1) == "1.50 x against 12 ms at TP 1; goal 1.6: missed by 6.2%"
    four = Baseline(file, about, "27b", 4).compare("TPOT 1", Measured(4.0, "ms"))
    assert four.line("ms", 1) == "3.00 x against 12 ms at TP 1; goal 2.6: met"
    assert Baseline(file, about, "9b", 2).compare("TPOT 1", Measured(8.0, "ms")).goal is None
    assert Baseline(file, about, "27b", 2).compare("mixed", Measured(8.0, "ms")) is None
    more = Baseline(file, about, "27b", 2).compare("TPOT 1", Measured(24.0, "", more_is_better=True))
    assert more.speedup == 2.0
    with pytest.raises(ValueError, match=r"has model 'qwen3.5-27b.yaml', this run 'demo-model'"):
        Baseline(file, about | {"model": "configs/demo-model"}, None, 2)
    file.write_text("[]")
    with pytest.raises(ValueError, match="one.json is no JSON file of this benchmark"):
        Baseline(file, about, "27b", 2)


def test_what_it_refuses(script: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)

    wrong = run("--shape", "no-such")
    assert wrong.returncode == 2 and "'no-such' is no path and none of qwen3-next-80b-a3b, " in wrong.stderr
    listed = run("--shape", "27b", "--list", "--only", "TPOT 32")
    assert listed.stdout.split("\n") == ["TPOT 32", "TPOT 32 at 2048", ""]


def test_goals(modules: None, repo_root: Path) -> None:
    from goals import GOALS, Goal, goals_of
    from report import verdict
    from rows import Measured

    from hybridserve.replicas.models.config import load_model_config

    shapes = repo_root / "configs" / "models"
    for name in ("9b", "27b"):
        assert goals_of(load_model_config(shapes / f"qwen3.5-{name}.yaml")) is GOALS[name]
    assert goals_of(load_model_config(shapes / "qwen3.5-0.8b.yaml")) == {}
    goal = Goal(10.0, further=8.0)
    assert verdict(Measured(11.0, "ms"), goal) == "missed by 10.0%"
    assert verdict(Measured(9.0, "ms"), goal) == "met; 8 missed by 12.5%"
    assert verdict(Measured(8.0, "ms"), goal) == "met, 8 too"
    assert verdict(Measured(9.0, "sequences", more_is_better=True), Goal(10.0)) == "missed by 10.0%"
    assert verdict(Measured(10.0, "sequences", more_is_better=True), Goal(10.0)) == "met"


def test_a_gpus_trace(modules: None) -> None:
    """Kernels go to the innermost part in which they were launched, whenever they ran."""
    from step_profile import REST, summarise

    def part(name: str, ts: float, dur: float) -> dict[str, object]:
        return {"cat": "user_annotation", "name": f"part: {name}", "ts": ts, "dur": dur}

    def kernel(
        name: str, correlation: int, launched: float, ts: float, dur: float
    ) -> list[dict[str, object]]:
        launch = {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": launched, "dur": 1}
        ran = {"cat": "kernel", "name": name, "ts": ts, "dur": dur}
        return [e | {"args": {"correlation": correlation}} for e in (launch, ran)]

    events = [
        part("linear_attn", 0, 10),
        part("mlp", 20, 30),
        part("norm", 25, 5),
        {"cat": "user_annotation", "name": "someone else's", "ts": 0, "dur": 100},
        *kernel("nvjet_tst_128x256", 1, launched=2, ts=100, dur=7),
        *kernel("_gdn_decode_kernel_of_nobody", 2, launched=10, ts=110, dur=5),
        *kernel("nvjet_tst_64x64", 3, launched=27, ts=120, dur=3),
        *kernel("cutlass_gemm", 4, launched=40, ts=130, dur=2),
        *kernel("at::native::argmax", 5, launched=60, ts=140, dur=1),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 150, "dur": 4, "args": {"correlation": 99}},
    ]
    found = summarise(events)
    assert found["parts_ms"] == {"linear_attn": 0.012, REST: 0.005, "norm": 0.003, "mlp": 0.002}
    assert found["kernels_ms"] == {
        "library GEMM": 0.012,
        "_gdn_decode_kernel_of_nobody": 0.005,
        "copies and fills": 0.004,
        "torch": 0.001,
    }
    assert found["total_ms"] == pytest.approx(0.022) and found["span_ms"] == pytest.approx(0.054)
    assert found["launches"] == 6


def test_our_kernels_are_known_by_name(modules: None) -> None:
    from step_profile import _our_kernels

    names = _our_kernels()
    assert len(names) > 20
    assert any(name.startswith("linear_attention: ") for name in names.values())
