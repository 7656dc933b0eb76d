"""This process' pool loads, by application and pool.

Serve pickles a request router's module by value, so what its router shares with the ingress in the same
process has to live in a module that it imports, this one.
"""

import threading

from hybridserve.cluster.routing.pool_loads import PoolLoads

_lock = threading.Lock()
_loads: dict[tuple[str, str], PoolLoads] = {}


def pool_loads(app_name: str, pool: str) -> PoolLoads:
    """The one `PoolLoads` of this process for that pool."""
    with _lock:
        return _loads.setdefault((app_name, pool), PoolLoads())
