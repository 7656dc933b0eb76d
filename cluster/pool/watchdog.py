"""Noticing that an engine has stopped stepping. Knows nothing of what a step is."""

import asyncio
from collections.abc import Callable

_TICKS = 20
_LONGEST_TICK_S = 1.0


class StepWatchdog:
    """Tells when one turn of the engine's loop has lasted too long.

    Counted in its own ticks: where the whole process stood still, the time it stood still does not count.

    Args:
        stuck_after_s: how long that is.
    """

    def __init__(self, stuck_after_s: float) -> None:
        self.tick_s = min(_LONGEST_TICK_S, stuck_after_s / _TICKS)
        self._limit = round(stuck_after_s / self.tick_s)
        self._turn: int | None = None
        self._ticks = 0

    def is_stuck(self, turn: int | None) -> bool:
        """To be asked every `tick_s`. turn: the number of the turn that lasts; None between turns."""
        same = turn is not None and turn == self._turn
        self._ticks = self._ticks + 1 if same else 0
        self._turn = turn
        return self._ticks >= self._limit

    async def watch(self, turn: Callable[[], int | None]) -> None:
        """Returns when the engine is stuck."""
        while not self.is_stuck(turn()):
            await asyncio.sleep(self.tick_s)
