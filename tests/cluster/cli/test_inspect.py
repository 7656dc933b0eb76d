import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


def cells(out: str, first: str) -> list[str]:
    """The cells of the table row whose first cell is `first`."""
    for line in out.splitlines():
        row = [cell.strip() for cell in re.split("[│┃|]", line)[1:-1]]
        if row and row[0] == first:
            return row
    raise AssertionError(f"no row {first!r} in\n{out}")


def test_table_of_the_demo_model(hybridserve: Callable, demo_model: Path) -> None:
    ran = hybridserve("inspect", demo_model)
    assert (ran.code, ran.err) == (0, "")
    assert "qwen3_5_text, 8 layers, bfloat16" in ran.out
    assert cells(ran.out, "0") == ["0", "linear", "4 k x 64, 8 v x 64", "1,586,896", "139,264", ""]
    assert cells(ran.out, "7") == ["7", "full", "8 q, 2 kv x 64", "1,495,808", "", "512"]
    assert cells(ran.out, "total") == ["total", "", "", "15,134,752", "835,584", "1,024"]
    assert cells(ran.out, "weights")[1] == "28.9 MiB"
    assert int(cells(ran.out, "sequences of 1,024 tokens at once")[1].replace(",", "")) > 40_000
    assert "sequences of 32,768" not in ran.out
    assert int(cells(ran.out, "sequences of 8,192 tokens at once")[1].replace(",", "")) > 8_000


def test_a_narrow_terminal_cuts_no_number(repo_root: Path) -> None:
    shape = repo_root / "configs" / "models" / "qwen3-next-80b-a3b.yaml"
    code = f"""
import sys
from hybridserve.cluster.cli.main import main
sys.argv = ["hybridserve", "inspect", {str(shape)!r}]
main()
"""
    environment = {**os.environ, "COLUMNS": "80"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert "…" not in ran.stdout and max(map(len, ran.stdout.splitlines())) <= 80
    total = cells(ran.stdout, "total")
    assert total[3:] == ["79,674,391,296", "77,856,768", "24,576"]


def test_memory_dtype_and_shards(hybridserve: Callable, demo_model: Path) -> None:
    ran = hybridserve("inspect", demo_model, "--memory", "100MiB", "--dtype", "float32", "--tp", 2)
    assert "float32, one of 2 shards" in ran.out
    assert cells(ran.out, "total")[-1] == "1,024"
    assert cells(ran.out, "0")[2] == "2 k x 64, 4 v x 64"
    ran = hybridserve("inspect", demo_model, "--state-dtype", "bfloat16")
    # 8 heads of 64 x 64 in half of the bytes, the convolution's inputs as before
    assert cells(ran.out, "0")[4] == f"{139_264 - 8 * 64 * 64 * 2:,}"
    ran = hybridserve("inspect", demo_model, "--memory", "20MiB")
    assert ran.code == 0
    assert cells(ran.out, "missing for the weights")[1] == "8.87 MiB"


def test_weights_are_not_needed(hybridserve: Callable, demo_model: Path, tmp_path: Path) -> None:
    shutil.copy(demo_model / "config.json", tmp_path)
    assert cells(hybridserve("inspect", tmp_path).out, "total")[3] == "15,134,752"


def test_no_torch_is_imported(demo_model: Path) -> None:
    code = f"""
import sys
from hybridserve.cluster.cli.main import main
sys.argv = ["hybridserve", "inspect", {str(demo_model)!r}]
try:
    main()
except SystemExit as end:
    assert not end.code
assert not {{"torch", "transformers", "ray"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["/nowhere"], 1, "error: model folder /nowhere does not exist"),
        (["MODEL", "--memory", "much"], 1, "memory must be a size such as 80GiB or 500MB, got 'much'"),
        (
            ["MODEL", "--dtype", "int3"],
            1,
            "dtype must be one of auto, float32, bfloat16, float16, got 'int3'",
        ),
        (["MODEL", "--state-dtype", "float16"], 1, "state_dtype must be one of float32, bfloat16, got"),
        (["MODEL", "--tp", "3"], 1, "tp_size 3 does not divide"),
        (["MODEL", "--tp", "0"], 2, "--tp"),
        ([], 2, "Missing argument"),
    ],
)
def test_errors_are_short(
    hybridserve: Callable, demo_model: Path, args: list[str], code: int, message: str
) -> None:
    ran = hybridserve("inspect", *(demo_model if arg == "MODEL" else arg for arg in args))
    assert ran.code == code
    assert message in ran.err
    assert "Traceback" not in ran.err
    if code == 1:
        assert ran.err.count("\n") == 1


def test_an_unsupported_model_is_named(hybridserve: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ran = hybridserve("inspect", tmp_path)
    assert ran.code == 1
    assert "'llama'" in ran.err
