"""An application for Serve to build by its import path: our ingress and pool over engines without a model.

The folder is on the path of the processes that build and run it; fake engines are those of all cluster tests.
"""

import importlib.util
import sys
from pathlib import Path

from ray import cloudpickle
from ray.serve import Application

from hybridserve.cluster.ingress.deployment import build_ingress
from hybridserve.cluster.pool.deployment import build_pool
from hybridserve.cluster.settings_reading import parse_settings

_CONFTEST = Path(__file__).parents[1] / "conftest.py"


def build(args: dict[str, object]) -> Application:
    """args: `settings`, and `error`, with which the engines fail to start."""
    settings = parse_settings(args["settings"])
    [spec] = settings.pool_specs()
    # slow steps leave the cores to the processes that start
    factory = _fakes().FakeFactory(step_s=0.02, error=args.get("error"))
    return build_ingress(settings, {spec.name: build_pool(settings, spec, "cpu", factory)})


def _fakes():
    name = "hybridserve_test_fakes"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _CONFTEST)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        cloudpickle.register_pickle_by_value(sys.modules[name])
    return sys.modules[name]
