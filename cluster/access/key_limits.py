"""What each name uses in one ingress replica, held against its limits.

A name's keys share its use, so a rotation doubles nothing. Each of several ingress replicas has its share of
every limit, rounded up: they do not talk to each other, and a limit of 1 is to let somebody in at each.
"""

import math
import time
from collections.abc import Callable

from hybridserve.cluster.access.bucket import TokenBucket
from hybridserve.cluster.access.keys import KeyEntry, KeyLimits
from hybridserve.cluster.pool.interface import PoolBusy
from hybridserve.cluster.routing.admission import RejectReason

Clock = Callable[[], float]


class KeyUse:
    """One name's use in this process."""

    def __init__(self, name: str, num_ingress: int, clock: Clock) -> None:
        self._name = name
        self._num_ingress = num_ingress
        self._clock = clock
        self._limits: KeyLimits | None = None
        self._max_concurrent: int | None = None
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.in_flight = 0

    def set_limits(self, limits: KeyLimits) -> None:
        if limits == self._limits:
            return
        self._limits = limits
        self._max_concurrent = self._share(limits.max_concurrent)
        self.requests = self._bucket(self.requests, limits.requests_per_minute)
        self.tokens = self._bucket(self.tokens, limits.tokens_per_minute)

    def enter(self) -> None:
        """Begin a request; `leave` ends it. Raises PoolBusy at a limit, which uses up nothing."""
        if self._max_concurrent is not None and self.in_flight >= self._max_concurrent:
            raise self._busy(
                "key_concurrency",
                f"{self.in_flight} requests are in flight, max_concurrent allows {self._max_concurrent}",
                # nobody knows when one of them ends
                1.0,
            )
        if self.requests is not None:
            now = self._clock()
            wait = self.requests.wait_s(1, now)
            if wait:
                raise self._busy("key_rate", f"requests_per_minute allows {self.requests.per_minute}", wait)
            self.requests.take(1, now)
        self.in_flight += 1

    def leave(self) -> None:
        assert self.in_flight > 0, "left more often than entered"
        self.in_flight -= 1

    def take_tokens(self, expected: int) -> None:
        """Charge a prompt and its expected answer. Raises PoolBusy when they are too many for now."""
        if self.tokens is None:
            return
        now = self._clock()
        wait = self.tokens.wait_s(expected, now)
        if wait:
            raise self._busy(
                "key_tokens",
                f"{max(0, int(self.tokens.level(now)))} of tokens_per_minute {self.tokens.per_minute} are "
                f"left, and the prompt and its expected answer have {expected}",
                wait,
            )
        self.tokens.take(expected, now)

    def correct_tokens(self, unused: int) -> None:
        """Give back what was charged in vain; negative: charge what came on top."""
        if self.tokens is not None and unused:
            self.tokens.give_back(unused, self._clock())

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What OpenAI's clients know of rate limits; of this ingress replica's share."""
        now = self._clock()
        found = []
        for bucket, what in ((self.requests, b"requests"), (self.tokens, b"tokens")):
            if bucket is not None:
                left, reset = max(0, int(bucket.level(now))), f"{bucket.full_after_s(now):.3f}s"
                found += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, reset.encode()),
                ]
        return found

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else -(-limit // self._num_ingress)

    def _bucket(self, bucket: TokenBucket | None, limit: int | None) -> TokenBucket | None:
        share = self._share(limit)
        if share is None:
            return None
        if bucket is None:
            return TokenBucket(share, self._clock())
        bucket.set_rate(share, self._clock())
        return bucket

    def _busy(self, reason: RejectReason, message: str, wait_s: float) -> PoolBusy:
        retry = max(1, math.ceil(wait_s))
        of = "" if self._num_ingress == 1 else f" (its share at each of {self._num_ingress} ingress replicas)"
        return PoolBusy(f"API key {self._name}: {message}{of}; try again in {retry} s", retry, reason)


class KeyLimiter:
    """Every name's use in this process; names live as long as it does, they are few."""

    def __init__(self, num_ingress: int, clock: Clock = time.monotonic) -> None:
        self._num_ingress = num_ingress
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}

    def use_of(self, entry: KeyEntry) -> KeyUse:
        """The name's use, with the limits that its key has now."""
        use = self._uses.get(entry.name)
        if use is None:
            use = self._uses[entry.name] = KeyUse(entry.name, self._num_ingress, self._clock)
        use.set_limits(entry.limits)
        return use
