import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from hybridserve.cluster.cli.main import main


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def hybridserve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs a command line in this process."""

    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["hybridserve", *map(str, args)])
        # wide enough that no cell is folded
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return Ran(int(exit_info.value.code or 0), captured.out, captured.err)

    return run
