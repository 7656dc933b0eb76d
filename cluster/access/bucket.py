"""A token bucket: so much a minute, a minute's worth at once. Pure arithmetic; the caller has the clock."""

_SECONDS = 60.0
# sums of floats: a bucket that lacks a billionth is not to send anybody away
_ROUNDING = 1e-6


class TokenBucket:
    """Holds at most `per_minute` and gains as much in a minute.

    It may be overdrawn: what came on top of an estimate is paid back by the time that follows.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def set_rate(self, per_minute: int, now: float) -> None:
        """From now on; what was used stays used."""
        if per_minute != self.per_minute:
            self._level = min(self.level(now) + per_minute - self.per_minute, float(per_minute))
            self.per_minute = per_minute

    def level(self, now: float) -> float:
        """What it holds; negative while it is overdrawn."""
        elapsed = max(0.0, now - self._at)
        self._at = max(self._at, now)
        self._level = min(self._level + elapsed * self.per_minute / _SECONDS, float(self.per_minute))
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; of more than it ever holds, until it is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return missing * _SECONDS / self.per_minute if missing > _ROUNDING else 0.0

    def full_after_s(self, now: float) -> float:
        return (self.per_minute - self.level(now)) * _SECONDS / self.per_minute

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def give_back(self, amount: float, now: float) -> None:
        """What was taken and is not used."""
        self._level = min(self.level(now) + amount, float(self.per_minute))
