"""The ingress process stays light: neither torch nor ray is imported with it."""

import subprocess
import sys

SCRIPT = """
import sys
import hybridserve.cluster.ingress.app
print(*sorted({"torch", "ray", "transformers", "triton"} & {name.split(".")[0] for name in sys.modules}))
"""


def test_importing_the_ingress_imports_no_torch_and_no_ray():
    out = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert out.stdout.split() == []
