"""A wheel holds every module, and what it holds can be imported without the repository."""

import json
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

IMPORT_ALL = """
import importlib, json, sys
names = sys.argv[1:]
files = {name: importlib.import_module(name).__file__ for name in names}
sys.stdout.write("\\n" + json.dumps(files))
"""


def test_packages_are_the_folders_on_disk(
    repo_root: Path, rooms: tuple[str, ...], module_files: tuple[Path, ...]
) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    on_disk = {".".join(("hybridserve", *path.parent.parts)) for path in module_files}
    assert sorted(listed) == sorted(on_disk | {f"hybridserve.{room}" for room in rooms})
    mapped = project["tool"]["setuptools"]["package-dir"]
    assert mapped == {f"hybridserve.{room}": room for room in rooms}


@pytest.fixture(scope="module")
def wheel(repo_root: Path, rooms: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the tree keeps no build folder: a stale one would ship deleted modules."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source)
    for room in rooms:
        shutil.copytree(repo_root / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_every_module(wheel: Path, module_files: tuple[Path, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    modules = sorted(name for name in names if ".dist-info/" not in name)
    assert modules == sorted(f"hybridserve/{path.as_posix()}" for path in module_files)
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_installed_wheel_imports_from_elsewhere(
    wheel: Path, module_names: tuple[str, ...], tmp_path: Path, run_python: Callable[..., str]
) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    done = subprocess.run([*install, str(wheel)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    # dependencies come from this environment; .pth files there, the editable install's among them, do not run
    (site_packages,) = environment.glob("lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies) + "\n")

    files = json.loads(run_python(IMPORT_ALL, *module_names, cwd=tmp_path, python=python).splitlines()[-1])
    assert all(Path(file).is_relative_to(site_packages) for file in files.values()), files


def test_editable_install_imports_from_elsewhere(
    repo_root: Path,
    module_files: tuple[Path, ...],
    module_names: tuple[str, ...],
    run_python: Callable[..., str],
) -> None:
    files = json.loads(run_python(IMPORT_ALL, *module_names, cwd=Path("/")).splitlines()[-1])
    on_disk = [str(repo_root / path) for path in module_files]
    assert files == dict(zip(module_names, on_disk, strict=True))
