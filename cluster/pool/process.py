"""What a process that is going to run a shard sets up before torch is loaded."""

import logging
import os


def prepare_process() -> None:
    """Let OpenMP's threads sleep while they wait, and the project's log lines reach the terminal."""
    # read when torch loads its OpenMP. Threads that wait by spinning take the cores that the proxy and the
    # ingress need: on two busy cores a step of 20 ms took 300
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    project = logging.getLogger("hybridserve")
    if project.handlers:
        return
    # ray passes a worker's stderr on to the terminal; its loggers are silent below warnings
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    project.addHandler(handler)
    project.setLevel(logging.INFO)
    project.propagate = False
