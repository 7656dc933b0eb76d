import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from hybridserve.parallel.comm_benchmark import launch
from hybridserve.parallel.comm_benchmark.schema import REPORT_SCHEMA
from hybridserve.parallel.comm_benchmark.settings import BenchmarkSettings


def test_quick_run_from_end_to_end(hybridserve: Callable, tmp_path: Path) -> None:
    """Ranks as processes, tables, JSON and plot, and what is expected of the latencies just measured."""
    report, plot = tmp_path / "report.json", tmp_path / "plot.png"
    options = ["--tp", 2, "--backend", "gloo", "--quick", "--sizes", "1KiB,8KiB", "--dtype", "bfloat16"]
    ran = hybridserve("bench", "comm", *options, "--json", report, "--plot", plot)
    assert (ran.code, ran.err) == (0, "")
    content = json.loads(report.read_text())
    jsonschema.validate(content, REPORT_SCHEMA)
    assert {row["bytes"] for row in content["collectives"] if not row["label"]} == {1024, 8192}
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in ("gather_projections", "not measured: all_reduce/one_shot", "NCCL_NVLS_ENABLE=0", "quick: "):
        assert words in ran.out
    shape = Path(__file__).parents[3] / "configs" / "models" / "qwen3.5-27b.yaml"
    ran = hybridserve("bench", "comm", "--expect", "--measured", report, "--model", shape)
    assert ran.code == 0 and "latencies measured" in ran.out and "decode 256" in ran.out


def test_a_long_run_says_so_first(hybridserve: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: BenchmarkSettings) -> None:
        raise ValueError(f"not {settings.tp_size} ranks")

    monkeypatch.setattr(launch, "run_local", refuse)
    ran = hybridserve("bench", "comm", "--tp", 2, "--backend", "gloo")
    assert ran.err == ("measuring 2 ranks by gloo takes minutes; --quick: seconds\nerror: not 2 ranks\n")


def test_assumed_latencies_are_called_so(hybridserve: Callable, repo_root: Path) -> None:
    shape = repo_root / "configs" / "models" / "qwen3-next-80b-a3b.yaml"
    ran = hybridserve("bench", "comm", "--expect", "--model", shape)
    assert ran.code == 0 and ran.out.count("ASSUMED") == 2
    assert "computing: H200, 4.3 TB/s and 790 TFLOP/s, of which 85% is reached" in ran.out
    (line,) = [line for line in ran.out.splitlines() if "prefill 8,192" in line and "│     8" in line][:1]
    assert "%" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "mpi"], "backend must be one of gloo, nccl, got 'mpi'"),
        (["--max-size", "12B"], "max_size must be at least 1024 bytes, got 12"),
        (["--sizes", "1KiB,many"], "sizes must be a size such as 80GiB or 500MB, got 'many'"),
        (["--json", "/nowhere/x.json"], "json '/nowhere/x.json': there is no folder /nowhere"),
        (["--plot", "x.doc"], "plot must end in .png, .svg, .pdf, got 'x.doc'"),
        (["--expect"], "expect needs --model"),
        (["--expect", "--model", "x.yaml", "--tp", 4], "expect measures nothing and takes no tp, got 4"),
        (["--expect", "--quick"], "expect measures nothing and takes no quick, got True"),
        (["--measured", "x.json"], "measured is read with --expect only"),
        (["--json", "/"], "json '/' cannot be written: Is a directory"),
        (["--json", "/dev/null/x.json"], "json '/dev/null/x.json': there is no folder /dev/null"),
        (["--ray-address", "auto", "--tp", 2], "ray_address needs --tp and --backend"),
        (["--tp", 0, "--backend", "gloo"], "tp must be at least 1, got 0"),
        (["--backend", "gloo", "--dtype", "int8"], "dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_options_are_checked_before_anything_runs(hybridserve: Callable, options, message) -> None:
    ran = hybridserve("bench", "comm", *options)
    assert ran.code == 1 and message in ran.err


def test_help_and_expectation_import_no_torch() -> None:
    code = "import sys\nimport hybridserve.cluster.cli.main\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
