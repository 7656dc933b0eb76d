"""The GPUs that an application's pools have claimed, so that together they ask for no more than there are.

Serve runs one policy for each pool, all in its controller's process, and copies the policies' module by
value; this module is imported by all of them, so the ledger is one.
"""

import threading
from collections.abc import Mapping

_lock = threading.Lock()
_ledgers: dict[str, "GpuLedger"] = {}


class GpuLedger:
    """Claims of one application's pools, in GPUs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[str, float] = {}

    def seed(self, claims: Mapping[str, float]) -> None:
        """What pools hold that have said nothing yet, or never will as their size is fixed."""
        with self._lock:
            for pool, gpus in claims.items():
                self._claims.setdefault(pool, gpus)

    def grant(self, pool: str, current: int, wanted: int, gpus_per_replica: float, total_gpus: float) -> int:
        """How many replicas of the `wanted` the pool may have; it keeps its `current` ones in any case."""
        with self._lock:
            granted = wanted
            if gpus_per_replica > 0 and wanted > current:
                others = sum(gpus for name, gpus in self._claims.items() if name != pool)
                room = int((total_gpus - others) // gpus_per_replica)
                granted = min(wanted, max(current, room))
            self._claims[pool] = granted * gpus_per_replica
            return granted


def gpu_ledger(app_name: str) -> GpuLedger:
    """The one ledger of this process for that application."""
    with _lock:
        return _ledgers.setdefault(app_name, GpuLedger())
