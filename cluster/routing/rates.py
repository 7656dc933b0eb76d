"""How fast a pool gets on, from the counters in its replicas' reports."""

import math

_WINDOW_S = 0.25
_DECAY_S = 3.0


class TokenRate:
    """One replica's tokens per second while it has work, smoothed over a few seconds."""

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None
        """None before the first window of work has passed."""
        self._since: float | None = None
        self._tokens = 0

    def observe(self, now: float, progressed_tokens: int, busy: bool) -> None:
        """A report: the counter of tokens computed since start, and whether there is more to do."""
        if not busy or self._since is None or progressed_tokens < self._tokens:
            # idle time says nothing of the speed, and a counter that fell is another process'
            self._since, self._tokens = (now if busy else None), progressed_tokens
            return
        elapsed = now - self._since
        if elapsed < _WINDOW_S:
            return
        rate = (progressed_tokens - self._tokens) / elapsed
        self._since, self._tokens = now, progressed_tokens
        if self.tokens_per_s is None:
            self.tokens_per_s = rate
        else:
            weight = 1.0 - math.exp(-elapsed / _DECAY_S)
            self.tokens_per_s += weight * (rate - self.tokens_per_s)
