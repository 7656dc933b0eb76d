import sys
from pathlib import Path

import pytest

from hybridserve.parallel.comm_benchmark.plot import check_plot, curves, draw


def row(strategy: str, ranks: int, mode: str, us: float, sent: float) -> dict[str, object]:
    return {
        "case": "decode 1",
        "strategy": strategy,
        "ranks": ranks,
        "mode": mode,
        "with_communication": {"p50_us": us},
        "wire_bytes_per_token": sent,
    }


def report(*rows: dict[str, object]) -> dict[str, object]:
    settings = {"layer": {"name": "tiny"}, "backend": "gloo", "dtype": "float32"}
    return {"settings": settings, "strategies": list(rows)}


REPORT = report(
    row("value_heads", 2, "eager", 5.0, 10.0),
    row("value_heads", 1, "eager", 8.0, 0.0),
    {"case": "decode 1", "strategy": "head_v_dim", "ranks": 2, "unavailable": "no"},
)


def test_curves_are_sorted_by_ranks_and_leave_out_what_did_not_run() -> None:
    (line,) = curves(REPORT)["decode 1"]
    assert (line.ranks, line.wire_bytes_per_token, line.microseconds) == ((1, 2), (0.0, 10.0), (8.0, 5.0))


def test_graphs_are_drawn_where_there_are_any() -> None:
    prefill = {**row("value_heads", 1, "eager", 9.0, 0.0), "case": "prefill 128"}
    both = report(row("value_heads", 1, "eager", 8.0, 0.0), row("value_heads", 1, "graph", 3.0, 0.0), prefill)
    assert curves(both)["decode 1"][0].microseconds == (3.0,)
    assert curves(both)["prefill 128"][0].microseconds == (9.0,)


def test_the_picture(tmp_path: Path) -> None:
    draw(REPORT, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert "<svg" in text


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'hybridserve\[bench\]'"):
        check_plot(tmp_path / "picture.png")


def test_endings_and_folders_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plot must end in .png, .svg, .pdf, got"):
        check_plot(tmp_path / "picture.doc")
    with pytest.raises(ValueError, match="there is no folder"):
        check_plot(tmp_path / "none" / "picture.png")
