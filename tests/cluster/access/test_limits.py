"""Buckets and names' use, by a clock of the tests' own."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.access.bucket import TokenBucket
from hybridserve.cluster.access.key_limits import KeyLimiter, KeyUse
from hybridserve.cluster.access.keys import KeyEntry, KeyLimits, hash_key
from hybridserve.cluster.access.record import RequestRecord
from hybridserve.cluster.pool.interface import PoolBusy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entry(name: str = "a", key: str = "k", **limits: int) -> KeyEntry:
    return KeyEntry(name=name, sha256=hash_key(key), limits=KeyLimits(**limits))


def test_a_bucket_holds_a_minutes_worth() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == 0
    assert bucket.full_after_s(10.0) == pytest.approx(50.0)
    assert bucket.level(1000.0) == 60


def test_more_than_a_bucket_holds_is_taken_from_a_full_one_and_paid_back() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.wait_s(150, 0.0) == 0
    bucket.take(150, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(91.0)
    assert bucket.wait_s(150, 0.0) == pytest.approx(150.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 500), st.integers(0, 500)), max_size=60),
)
def test_no_more_passes_than_a_minute_and_what_was_given_back_allow(
    rate: int, events: list[tuple[float, int, int]]
) -> None:
    """Used <= a full bucket + rate x time + what one request overdraws, whatever is taken and given back."""
    bucket, now, used, largest = TokenBucket(rate, 0.0), 0.0, 0, 0
    for elapsed, amount, unused in events:
        now += elapsed
        wait = bucket.wait_s(amount, now)
        assert wait >= 0
        if wait:
            # the promise: who waits that long gets in
            assert TokenBucket.wait_s(bucket, amount, now) <= wait
            continue
        bucket.take(amount, now)
        given_back = min(unused, amount)
        bucket.give_back(given_back, now)
        used += amount - given_back
        largest = max(largest, amount - given_back)
        assert bucket.level(now) <= rate
    assert used <= rate + rate * now / 60 + largest + 1e-3


@given(st.integers(1, 1000), st.integers(1, 2000), st.floats(0, 100))
def test_who_waits_as_told_gets_in(rate: int, amount: int, later: float) -> None:
    bucket = TokenBucket(rate, 0.0)
    bucket.take(amount, 0.0)
    wait = bucket.wait_s(amount, later)
    assert bucket.wait_s(amount, later + math.ceil(wait)) == 0


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60, 50.0)
    bucket.take(60, 50.0)
    assert bucket.level(20.0) == 0
    assert bucket.level(51.0) == pytest.approx(1.0)


def test_requests_per_minute(clock: Clock) -> None:
    use = KeyLimiter(1, clock).use_of(entry(requests_per_minute=2))
    for _ in range(2):
        use.enter()
        use.leave()
    with pytest.raises(PoolBusy, match="API key a: requests_per_minute allows 2; try again in 30 s") as busy:
        use.enter()
    assert (busy.value.reason, busy.value.retry_after_s) == ("key_rate", 30)
    clock.now += 30
    use.enter()
    assert use.headers() == [
        (b"x-ratelimit-limit-requests", b"2"),
        (b"x-ratelimit-remaining-requests", b"0"),
        (b"x-ratelimit-reset-requests", b"60.000s"),
    ]


def test_concurrency(clock: Clock) -> None:
    use = KeyLimiter(1, clock).use_of(entry(max_concurrent=2, requests_per_minute=100))
    use.enter()
    use.enter()
    for _ in range(3):
        with pytest.raises(PoolBusy) as busy:
            use.enter()
        assert busy.value.reason == "key_concurrency"
    use.leave()
    use.enter()
    # a refused request uses up no rate
    assert dict(use.headers())[b"x-ratelimit-remaining-requests"] == b"97"


def test_two_keys_of_a_name_share_its_use_and_others_do_not(clock: Clock) -> None:
    limiter = KeyLimiter(1, clock)
    first = limiter.use_of(entry(key="old", requests_per_minute=1))
    assert limiter.use_of(entry(key="new", requests_per_minute=1)) is first
    first.enter()
    limiter.use_of(entry(name="b", requests_per_minute=1)).enter()


def test_an_ingress_has_its_share_rounded_up(clock: Clock) -> None:
    use = KeyLimiter(3, clock).use_of(entry(requests_per_minute=7, max_concurrent=1))
    use.enter()
    with pytest.raises(PoolBusy, match="its share at each of 3 ingress replicas"):
        use.enter()
    assert dict(use.headers())[b"x-ratelimit-limit-requests"] == b"3"


def test_changed_limits_hold_at_once_and_forget_nothing(clock: Clock) -> None:
    limiter = KeyLimiter(1, clock)
    use = limiter.use_of(entry(requests_per_minute=10))
    for _ in range(10):
        use.enter()
    limiter.use_of(entry(requests_per_minute=12))
    use.enter()
    use.enter()
    with pytest.raises(PoolBusy):
        use.enter()
    limiter.use_of(entry(max_concurrent=12))
    with pytest.raises(PoolBusy) as busy:
        use.enter()
    assert busy.value.reason == "key_concurrency"
    limiter.use_of(entry())
    use.enter()
    assert use.headers() == []


def left(use: KeyUse) -> int:
    return int(dict(use.headers())[b"x-ratelimit-remaining-tokens"])


def test_tokens_are_charged_as_expected_and_settled_as_used(clock: Clock) -> None:
    use = KeyLimiter(1, clock).use_of(entry(tokens_per_minute=1000))
    record = RequestRecord(use)
    record.admit("cmpl-1", "demo", 100, 256)
    assert left(use) == 644
    for _ in range(3):
        record.add(0, 10, "x")
    assert left(use) == 644
    record.settle(200)
    assert left(use) == 870
    record.settle(200)
    assert left(use) == 870


def test_what_comes_on_top_of_the_expected_is_charged_too(clock: Clock) -> None:
    use = KeyLimiter(1, clock).use_of(entry(tokens_per_minute=1000))
    record = RequestRecord(use)
    record.admit("cmpl-1", "demo", 100, 256)
    record.add(0, 400, "x")
    assert left(use) == 500
    record.add(0, 600, "x")
    assert left(use) == 0
    record.settle(200)
    with pytest.raises(PoolBusy, match="0 of tokens_per_minute 1000 are left.* have 50") as busy:
        RequestRecord(use).admit("cmpl-2", "demo", 40, 10)
    # 100 in debt, and 50 wanted
    assert (busy.value.reason, busy.value.retry_after_s) == ("key_tokens", 9)
    clock.now += 9
    RequestRecord(use).admit("cmpl-2", "demo", 40, 10)


@pytest.mark.parametrize(("status", "cost"), [(429, 0), (503, 0), (400, 100), (499, 100), (200, 100)])
def test_what_was_not_served_costs_nothing(clock: Clock, status: int, cost: int) -> None:
    use = KeyLimiter(1, clock).use_of(entry(tokens_per_minute=1000))
    record = RequestRecord(use)
    record.admit("cmpl-1", "demo", 100, 256)
    record.settle(status)
    assert left(use) == 1000 - cost


def test_a_refused_request_is_charged_nothing(clock: Clock) -> None:
    use = KeyLimiter(1, clock).use_of(entry(tokens_per_minute=100))
    RequestRecord(use).admit("cmpl-1", "demo", 60, 20)
    record = RequestRecord(use)
    with pytest.raises(PoolBusy):
        record.admit("cmpl-2", "demo", 60, 20)
    record.settle(429)
    assert left(use) == 20
