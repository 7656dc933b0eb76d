"""How fast a pool gets on, from the counters in its replicas' reports."""

import math

_WINDOW_S = 0.25
_DECAY_S = 3.0


class TokenRate:
    """One replica's tokens per second while it has work, smoothed over a few seconds.

    Args:
        forgets: whether a pause makes what was measured before it worthless.
    """

    # two for each replica and ingress
    __slots__ = ("_forgets", "_since", "_tokens", "tokens_per_s")

    def __init__(self, forgets: bool = False) -> None:
        self._forgets = forgets
        self.tokens_per_s: float | None = None
        """None before the first window of work has passed."""
        self._since: float | None = None
        self._tokens = 0

    def observe(self, now: float, counter: int, busy: bool) -> None:
        """A report: a counter of tokens since start, and whether there is more to do."""
        if not busy or self._since is None or counter < self._tokens:
            # idle time says nothing of the speed, and a counter that fell is another process'
            self._since, self._tokens = (now if busy else None), counter
            if self._forgets and not busy:
                self.tokens_per_s = None
            return
        elapsed = now - self._since
        # a long prompt is counted in one go: a window without news goes on until there are some
        if elapsed < _WINDOW_S or counter == self._tokens:
            return
        rate = (counter - self._tokens) / elapsed
        self._since, self._tokens = now, counter
        if self.tokens_per_s is None:
            self.tokens_per_s = rate
        else:
            weight = 1.0 - math.exp(-elapsed / _DECAY_S)
            self.tokens_per_s += weight * (rate - self.tokens_per_s)
