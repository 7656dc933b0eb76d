"""What is decided about a request whose replica failed, without a replica."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from hybridserve.cluster.pool.interface import (
    GenerationRequest,
    PoolBusy,
    PoolError,
    ReaderTooSlow,
    ReplicaFailed,
)
from hybridserve.cluster.pool.retry import SAME_REPLICA_PAUSE_S, Attempts, RetryPolicy, begin
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

FAILED = ReplicaFailed("it died")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def request(**sampling: object) -> GenerationRequest:
    return GenerationRequest("r", (1, 2), SamplingParams(max_tokens=20, **sampling), 20)


def attempts(policy: RetryPolicy | None = None, clock: Clock | None = None, **sampling: object) -> Attempts:
    return Attempts(request(**sampling), policy or RetryPolicy(), clock or Clock())


def test_a_request_that_sent_nothing_is_sent_once_more_as_it_was() -> None:
    one = attempts(temperature=0.0)
    assert (one.retrying, one.resuming) == (False, False)
    assert one.pause_after(FAILED, "a") == 0.0
    assert (one.retrying, one.resuming) == (True, False)
    assert (one.request.output_token_ids, one.request.attempt) == ((), 1)
    assert one.pause_after(FAILED, "b") is None


def test_one_that_sent_tokens_goes_on_after_them() -> None:
    one = attempts()
    one.took(EngineOutput("", 0))
    one.took(EngineOutput("", 0, (7, 8)))
    one.took(EngineOutput("", 2, (9,)))
    assert one.pause_after(FAILED, "a") == 0.0
    assert one.resuming
    assert one.request.output_token_ids == (7, 8, 9)


def test_a_seed_is_fixed_beforehand_where_a_draw_may_have_to_be_repeated() -> None:
    drawn = attempts()
    assert isinstance(drawn.request.params.seed, int)
    assert attempts().request.params.seed != drawn.request.params.seed
    assert attempts(seed=5).request.params.seed == 5
    assert attempts(temperature=0.0).request.params.seed is None
    assert attempts(RetryPolicy(resume=False)).request.params.seed is None
    assert attempts(RetryPolicy(wait_s=0)).request.params.seed is None


def test_without_resume_only_requests_without_tokens_are_sent_again() -> None:
    policy = RetryPolicy(resume=False)
    assert attempts(policy).pause_after(FAILED, "a") == 0.0
    begun = attempts(policy)
    begun.took(EngineOutput("", 0, (7,)))
    assert begun.pause_after(FAILED, "a") is None


@pytest.mark.parametrize(
    "error",
    [
        PoolError("no replica answers"),
        ReaderTooSlow("4096 tokens were not read"),
        PoolBusy("full", 1, "token_budget"),
    ],
)
def test_what_is_no_replicas_failure_is_told(error: PoolError) -> None:
    assert attempts().pause_after(error, "a") is None


def test_without_a_wait_every_failure_is_told() -> None:
    assert attempts(RetryPolicy(wait_s=0)).pause_after(FAILED, "a") is None


def test_the_same_dead_replica_costs_no_attempt_but_time() -> None:
    """Serve takes a second to take a replica out whose engine is dead, and its router may choose it again."""
    clock = Clock()
    one = attempts(RetryPolicy(wait_s=10.0), clock)
    assert one.pause_after(FAILED, "a") == 0.0
    for _ in range(3):
        clock.now += 1
        assert one.pause_after(FAILED, "a") == SAME_REPLICA_PAUSE_S
    assert one.remaining_s == 7.0
    assert one.request.attempt == 4
    clock.now += 7
    assert one.pause_after(FAILED, "a") is None
    assert one.remaining_s == 0.0
    other = attempts()
    assert other.pause_after(FAILED, "a") == 0.0
    assert other.pause_after(FAILED, "a") == SAME_REPLICA_PAUSE_S
    assert other.pause_after(FAILED, "b") is None


def test_a_failure_of_no_known_replica_is_retried_once() -> None:
    one = attempts()
    assert one.pause_after(FAILED, None) == 0.0
    assert one.pause_after(FAILED, None) is None


class News:
    """An attempt's outputs, `after_s` from now."""

    def __init__(self, after_s: float = 0.0, error: Exception | None = None) -> None:
        self.closed = False
        self._after_s = after_s
        self._error = error

    async def __call__(self) -> AsyncGenerator[EngineOutput, None]:
        try:
            await asyncio.sleep(self._after_s)
            if self._error is not None:
                raise self._error
            yield EngineOutput("", 3, (9,))
        finally:
            self.closed = True


def retrying(wait_s: float, tokens: tuple[int, ...] = ()) -> Attempts:
    one = attempts(RetryPolicy(wait_s=wait_s))
    one.took(EngineOutput("", 0, tokens))
    one.pause_after(FAILED, "a")
    return one


async def first_of(news: News, one: Attempts, has_replica: bool) -> EngineOutput:
    outputs = news()
    try:
        return await begin(outputs, one, lambda: has_replica)
    finally:
        await outputs.aclose()


@pytest.mark.anyio
async def test_a_retry_waits_for_a_replica_so_long_and_then_for_its_turn_there() -> None:
    clock_of_the_loop = attempts(RetryPolicy(wait_s=0.05))
    clock_of_the_loop.pause_after(FAILED, "a")
    lost = News(after_s=30)
    with pytest.raises(ReplicaFailed, match="no other replica"):
        await first_of(lost, clock_of_the_loop, has_replica=False)
    assert lost.closed
    assert (await first_of(News(after_s=0.2), clock_of_the_loop, has_replica=True)).token_ids == (9,)
    assert (await first_of(News(), retrying(10.0), has_replica=False)).token_ids == (9,)


@pytest.mark.anyio
async def test_a_retry_that_fails_and_one_that_is_refused() -> None:
    with pytest.raises(ReplicaFailed, match="it died"):
        await first_of(News(error=FAILED), retrying(10.0), has_replica=True)
    with pytest.raises(ValueError, match="too long"):
        await first_of(News(error=ValueError("too long")), retrying(10.0), has_replica=True)
    with pytest.raises(PoolError, match="could not be resumed: too long"):
        await first_of(News(error=ValueError("too long")), retrying(10.0, (7,)), has_replica=True)
