"""Inside a Ray actor that has the repository root on its path, as a Serve replica has, everything imports."""

import json
from collections.abc import Callable
from pathlib import Path

IMPORT_IN_ACTOR = """
import json, sys
import ray

@ray.remote
class Importer:
    def load(self, root, elsewhere, names):
        import importlib, sys
        sys.path.insert(0, root)
        sys.path.append(elsewhere)
        files = [importlib.import_module(name).__file__ for name in names]
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
        return files, Qwen3_5ForCausalLM.__name__

ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
try:
    loaded = ray.get(Importer.remote().load.remote(sys.argv[1], sys.argv[2], sys.argv[3:]), timeout=180)
finally:
    ray.shutdown()
sys.stdout.write("\\n" + json.dumps(loaded))
"""


def test_imports_inside_an_actor_at_the_repository_root(
    repo_root: Path,
    module_files: tuple[Path, ...],
    module_names: tuple[str, ...],
    tmp_path: Path,
    run_python: Callable[..., str],
) -> None:
    ours = {
        n: str(repo_root / f)
        for n, f in zip(module_names, module_files, strict=True)
        if f.parts[0] == "kernels"
    }
    # stands for Hugging Face's `kernels`, which transformers imports where it is installed: our folder of
    # that name comes first on the path and would hide it, were it a regular package
    theirs = tmp_path / "kernels" / "__init__.py"
    theirs.parent.mkdir()
    theirs.write_text("")
    out = run_python(IMPORT_IN_ACTOR, str(repo_root), str(tmp_path), *ours, "kernels", cwd=Path("/"))
    assert json.loads(out.splitlines()[-1]) == [[*ours.values(), str(theirs)], "Qwen3_5ForCausalLM"]
