"""The kernels' benchmark declares its cases without a GPU."""

import subprocess
import sys


def test_every_case_can_be_listed(repo_root):
    script = repo_root / "tests" / "benchmarks" / "bench_kernels.py"
    listed = subprocess.run([sys.executable, script, "--list"], capture_output=True, text=True, check=True)
    lines = listed.stdout.splitlines()
    assert len(lines) == len(set(lines)) > 0
    assert "rms_norm: 8192 x 4096 bf16" in lines
    unknown = subprocess.run([sys.executable, script, "--only", "no such"], capture_output=True, text=True)
    assert unknown.returncode == 2 and "matches no case" in unknown.stderr
