"""Imported by every worker process of the cluster when it starts (Ray's `preload_python_modules`).

A worker that was started for somebody has his job's id in its environment; one of `spare_workers` was started
for nobody. That one loads what a replica needs, here and now, as importing is all that Ray does with this
module; to the others it costs nothing.
"""

import os

NOBODYS_JOB = "ffffffff"


def is_spare() -> bool:
    """Whether this process is a worker that was started for nobody."""
    return os.environ.get("RAY_JOB_ID") == NOBODYS_JOB


if is_spare():
    from hybridserve.cluster.pool import spare

    spare.load()
