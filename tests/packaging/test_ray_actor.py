"""Inside a Ray actor that has the repository root on its path, everything still imports."""

import json
from collections.abc import Callable
from pathlib import Path

IMPORT_IN_ACTOR = """
import json, sys
import ray

@ray.remote
class Importer:
    def load(self, root, names):
        import importlib, sys
        # a Serve replica started from the repository has its root here
        sys.path.insert(0, root)
        files = [importlib.import_module(name).__file__ for name in names]
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
        return files, Qwen3_5ForCausalLM.__name__

ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
try:
    loaded = ray.get(Importer.remote().load.remote(sys.argv[1], sys.argv[2:]), timeout=180)
finally:
    ray.shutdown()
sys.stdout.write("\\n" + json.dumps(loaded))
"""


def test_imports_inside_an_actor_at_the_repository_root(
    repo_root: Path, module_names: tuple[str, ...], run_python: Callable[..., str]
) -> None:
    kernels = [name for name in module_names if name.startswith("hybridserve.kernels.")]
    out = run_python(IMPORT_IN_ACTOR, str(repo_root), *kernels, cwd=Path("/"))
    files, model_class = json.loads(out.splitlines()[-1])
    assert len(files) == len(kernels)
    assert all(Path(file).is_relative_to(repo_root / "kernels") for file in files), files
    assert model_class == "Qwen3_5ForCausalLM"
