"""How often streams are read while an ingress has more to do than it can.

A running stream's event costs many times what a token in it does, and all streams that have begun would have
one with every step: an ingress that 64 requests reach at once then spends its time on the first ones' tokens
and lets the others wait. So while its event loop is busy, a stream that has begun is read less often, and
more tokens become one event. Knows nothing of what is read.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.01
LONGEST_S = 0.04
"""Between two readings of a stream: hardly seen by who reads a text, and eight steps of a fast engine."""
# of the event loop's time
_BUSY = 0.6
_FREE = 0.5


class Held(Protocol):
    """A stream that has news and waits to be read."""

    def due(self, now: float) -> bool: ...

    def rouse(self) -> None: ...


class Pace:
    """Of one event loop's streams.

    Args:
        needed: whether there are streams; asked as long as there are.
        clock: seconds that only grow.
        cpu_clock: seconds of work of this thread.
    """

    def __init__(
        self,
        needed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._needed = needed
        self.clock = clock
        self._cpu_clock = cpu_clock
        self._running = False
        self._held: set[Held] = set()
        self._looked, self._worked = clock(), cpu_clock()
        self.interval_s = 0.0
        """How long a stream that was read is left alone; 0: not at all."""

    def start(self) -> None:
        """Look after the loop from now on, while it is needed."""
        if not self._running:
            self._running = True
            self._looked, self._worked = self.clock(), self._cpu_clock()
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def hold(self, stream: Held) -> None:
        """Rouse it when it is due."""
        self._held.add(stream)

    def look(self) -> None:
        """Set the interval by what the loop did since the last look, and rouse who is due."""
        now, worked = self.clock(), self._cpu_clock()
        passed = max(now - self._looked, 1e-6)
        # late also where other processes have the cores: whoever is behind had better do less
        late = passed > 2 * TICK_S
        share = (worked - self._worked) / passed
        self._looked, self._worked = now, worked
        if late or share > _BUSY:
            self.interval_s = min(LONGEST_S, max(TICK_S, 2 * self.interval_s))
        elif share < _FREE:
            self.interval_s = max(0.0, self.interval_s - TICK_S / 2)
        for stream in [one for one in self._held if one.due(now)]:
            self._held.discard(stream)
            stream.rouse()

    def _tick(self) -> None:
        self.look()
        self._running = self._needed()
        if self._running:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)
        else:
            self.interval_s = 0.0
            for stream in self._held:
                stream.rouse()
            self._held.clear()
