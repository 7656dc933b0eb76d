"""Who may import whom: cluster -> replicas -> parallel -> kernels, and one owner for each heavy library."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

OWNERS = {"ray": "cluster", "torch.distributed": "parallel", "triton": "kernels"}
ENVIRON_WRITES = {"clear", "pop", "popitem", "setdefault", "update", "__setitem__", "__delitem__"}


def imported_names(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module of `package` imports, anywhere in it, with the names it takes from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            yield from (
                a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
            )
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def forbidden_imports(source: str, room: str, rooms: tuple[str, ...], package: str) -> list[str]:
    """The names that a module of `room` imports and may not."""
    found = []
    for name in imported_names(ast.parse(source), package):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        owned_elsewhere = any(
            (name == library or name.startswith(library + ".")) and room != owner
            for library, owner in OWNERS.items()
        )
        upwards = top == "hybridserve" and target in rooms and rooms.index(target) < rooms.index(room)
        # `import kernels` finds our folder only from the repository root, and a stranger's package elsewhere
        if owned_elsewhere or upwards or top in rooms:
            found.append(name)
    return found


def environ_writes(source: str) -> list[int]:
    """Lines that change `os.environ` when the module is imported."""
    lines = []
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            written = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ENVIRON_WRITES
        ):
            written = node.func.value
        elif isinstance(node, ast.AugAssign):
            written = node.target
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.putenv", "os.unsetenv"):
            lines.append(node.lineno)
            continue
        else:
            continue
        if ast.unparse(written) in ("os.environ", "environ"):
            lines.append(node.lineno)
    return lines


def test_imports_keep_to_the_rooms(
    repo_root: Path, rooms: tuple[str, ...], module_files: tuple[Path, ...]
) -> None:
    found = {}
    for path in module_files:
        package = ".".join(("hybridserve", *path.parent.parts))
        names = forbidden_imports((repo_root / path).read_text(), path.parts[0], rooms, package)
        if names:
            found[str(path)] = names
    assert found == {}


def test_importing_a_module_leaves_the_environment_alone(
    repo_root: Path, module_files: tuple[Path, ...]
) -> None:
    found = {str(path): environ_writes((repo_root / path).read_text()) for path in module_files}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_rooms_are_no_packages_and_their_folders_are(repo_root: Path, module_files: tuple[Path, ...]) -> None:
    """A top-level `kernels/__init__.py` would hide Hugging Face's package `kernels` from transformers."""
    folders = {path.parent for path in module_files}
    with_init = {path.parent for path in module_files if path.name == "__init__.py"}
    assert with_init == {folder for folder in folders if len(folder.parts) > 1}


def test_ingress_runs_without_torch(module_names: tuple[str, ...], run_python: Callable[..., str]) -> None:
    ingress = [name for name in module_names if name.startswith("hybridserve.cluster.ingress")]
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\n"
    code += "sys.stdout.write('\\n' + str('torch' in sys.modules))"
    assert ingress
    assert run_python(code, *ingress, cwd=Path("/")).splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("kernels", "from hybridserve.parallel.layers import linear"),
        ("kernels", "from hybridserve import replicas"),
        ("parallel", "import hybridserve.replicas.outputs"),
        ("replicas", "def f():\n    import hybridserve.cluster.pool.interface"),
        ("parallel", "from ..replicas import outputs"),
        ("replicas", "import ray"),
        ("kernels", "from ray.util import placement_group"),
        ("cluster", "import torch.distributed as dist"),
        ("replicas", "from torch import distributed"),
        ("kernels", "from torch.distributed import all_reduce"),
        ("replicas", "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)"),
        ("parallel", "import triton.language as tl"),
        ("replicas", "import importlib\nimportlib.import_module('triton')"),
        ("replicas", "from kernels import rms_norm"),
    ],
)
def test_forbidden_imports_are_seen(rooms: tuple[str, ...], room: str, source: str) -> None:
    assert len(forbidden_imports(source, room, rooms, f"hybridserve.{room}")) == 1


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("cluster", "import ray\nfrom hybridserve.replicas.outputs import Logprob"),
        (
            "replicas",
            "import torch\nfrom hybridserve.parallel import layers\nfrom hybridserve.kernels import sampler",
        ),
        ("parallel", "import torch.distributed as dist"),
        ("kernels", "import triton\nimport triton.language as tl\nimport tritonish"),
    ],
)
def test_allowed_imports_are_left_alone(rooms: tuple[str, ...], room: str, source: str) -> None:
    assert forbidden_imports(source, room, rooms, f"hybridserve.{room}") == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A'] = '1'",
        "import os\nos.environ.setdefault('A', '1')",
        "import os\nif True:\n    del os.environ['A']",
        "from os import environ\nclass C:\n    environ.update(A='1')",
        "import os\nos.environ |= {'A': '1'}",
        "import os\nos.putenv('A', '1')",
    ],
)
def test_environment_writes_are_seen(source: str) -> None:
    assert len(environ_writes(source)) == 1
    assert environ_writes("import os\nA = os.environ['A'], os.environ.get('B')") == []
    assert environ_writes("import os\ndef f():\n    os.environ['A'] = '1'") == []
