"""Virtual time, and what is to happen in it, in order."""

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Seconds since the simulation began, called like `time.monotonic`; events keep their order."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        """That have happened."""
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, time_s: float, call: Callable[..., None], *args: object) -> None:
        """Have `call(*args)` happen at a time that has not passed."""
        assert time_s >= self.now, (time_s, self.now)
        heapq.heappush(self._events, (time_s, next(self._order), call, args))

    def run(self) -> None:
        """Until nothing is to happen any more."""
        while self._events:
            self.now, _, call, args = heapq.heappop(self._events)
            self.num_events += 1
            call(*args)
