"""What the packaging tests share: the rooms, the modules on disk, and a Python process elsewhere."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOMS = ("cluster", "replicas", "parallel", "kernels")


@pytest.fixture(scope="session")
def rooms() -> tuple[str, ...]:
    """The top-level folders that hold the product, callers before callees."""
    return ROOMS


@pytest.fixture(scope="session")
def module_files(repo_root: Path) -> tuple[Path, ...]:
    """Every module of the four rooms, relative to the repository root."""
    files = [path.relative_to(repo_root) for room in ROOMS for path in (repo_root / room).rglob("*.py")]
    assert files
    return tuple(sorted(files))


@pytest.fixture(scope="session")
def module_names(module_files: tuple[Path, ...]) -> tuple[str, ...]:
    """Import names of `module_files`; a package's `__init__.py` goes by the package's name."""
    parts = [path.with_suffix("").parts for path in module_files]
    return tuple(".".join(("hybridserve", *(p[:-1] if p[-1] == "__init__" else p))) for p in parts)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """`run_python(code, *args, cwd=…, python=…)`: standard output of that code in a process of its own."""

    def run(code: str, *args: str, cwd: Path, python: Path | str = sys.executable) -> str:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [str(python), "-c", code, *args]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
