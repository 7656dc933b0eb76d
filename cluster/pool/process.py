"""What a process that is going to run a shard sets up before torch is loaded."""

import os


def threads_wait_asleep() -> None:
    """Let OpenMP's threads, which read this when torch is loaded, sleep while they wait.

    Threads that wait by spinning take the cores that the proxy, the ingress and other shards need: on two
    busy cores a step of 20 ms took 300.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
