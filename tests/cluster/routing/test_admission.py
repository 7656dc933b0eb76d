"""Who may come in: properties of the rules over any totals, and their figures."""

from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.routing.admission import MAX_RETRY_S, REJECT_REASONS, Admission
from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.pool_loads import PoolTotals
from hybridserve.cluster.routing.pool_spec import PoolLimits

LIMITS = PoolLimits(40, 1000, 10.0, 0.8, 0.4)
IDLE = PoolTotals(2, 0, 0, 0, 0, None, 0.0)


@st.composite
def totals_of(draw: st.DrawFn) -> PoolTotals:
    outstanding = draw(st.integers(0, 5000))
    own = draw(st.integers(0, outstanding))
    return PoolTotals(
        replicas=draw(st.integers(0, 4)),
        own_requests=draw(st.integers(0 if own == 0 else 1, 50)),
        own_outstanding=own,
        outstanding=outstanding,
        queued=draw(st.integers(0, outstanding)),
        tokens_per_s=draw(st.none() | st.floats(1, 1000)),
        queue_wait_s=draw(st.none() | st.floats(0, 100)),
    )


requests = st.builds(Cost, st.integers(1, 2000), st.integers(1, 2000))


@given(totals_of(), requests, st.integers(1, 4))
def test_a_higher_priority_is_never_worse_off(totals: PoolTotals, cost: Cost, num_ingress: int) -> None:
    admission = Admission("p", LIMITS, num_ingress)
    answers = [admission.check(totals, cost, priority) for priority in ("high", "normal", "low")]
    assert [answer is None for answer in answers] == sorted((a is None for a in answers), reverse=True)
    for answer in answers:
        if answer is not None:
            assert answer.reason in REJECT_REASONS
            assert 1 <= answer.retry_after_s <= MAX_RETRY_S
            assert f"try again in {answer.retry_after_s} s" in answer.message


@given(totals_of(), requests, st.integers(0, 500))
def test_a_cheaper_request_and_an_emptier_pool_are_never_worse_off(
    totals: PoolTotals, cost: Cost, less: int
) -> None:
    admission = Admission("p", LIMITS, 1)
    if admission.check(totals, cost, "normal") is None:
        cheaper = Cost(cost.prompt_tokens, max(1, cost.answer_tokens - less))
        assert admission.check(totals, cheaper, "normal") is None
        fewer = PoolTotals(
            totals.replicas,
            totals.own_requests,
            max(0, totals.own_outstanding - less),
            max(0, totals.outstanding - less),
            max(0, totals.queued - less),
            totals.tokens_per_s,
            totals.queue_wait_s,
        )
        assert admission.check(fewer, cost, "normal") is None


@given(requests, st.integers(1, 8), st.sampled_from(["high", "normal", "low"]))
def test_an_idle_pool_takes_anything(cost: Cost, num_ingress: int, priority: str) -> None:
    assert Admission("p", LIMITS, num_ingress).check(IDLE, cost, priority) is None


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), max_size=60))
def test_ingresses_with_fresh_reports_stay_within_the_budget(
    num_ingress: int, arrivals: list[tuple[int, int]]
) -> None:
    admission = Admission("p", PoolLimits(10**6, 1000, 10.0, 1.0, 1.0), num_ingress)
    own = [0] * num_ingress
    for where, tokens in arrivals:
        one = where % num_ingress
        totals = PoolTotals(1, 1 if own[one] else 0, own[one], sum(own), 0, None, None)
        if admission.check(totals, Cost(tokens, 0), "normal") is None:
            own[one] += tokens
    # who keeps to its own share may meet others that have taken what was free before
    assert sum(own) <= 1000 * (0.9 + (num_ingress - 1) / num_ingress if num_ingress > 1 else 1)


def test_reasons_and_their_retry_after() -> None:
    admission = Admission("p", LIMITS, 2)
    cost = Cost(100, 100)

    def refusal(totals: PoolTotals, priority: str = "high"):
        answer = admission.check(totals, cost, priority)
        assert answer is not None
        return answer.reason, answer.retry_after_s

    # 20 of 40 for each ingress; one of them, 100 tokens, is done in 2 s
    assert refusal(PoolTotals(2, 20, 2000, 2000, 0, 50.0, 0.0)) == ("concurrent_requests", 2)
    # 2,200 of 2,000 would be outstanding
    assert refusal(PoolTotals(2, 9, 1500, 2000, 0, 50.0, None)) == ("token_budget", 4)
    assert refusal(PoolTotals(2, 9, 900, 1000, 0, 50.0, 0.0), "low") == ("priority_share", 8)
    assert refusal(PoolTotals(2, 9, 500, 1500, 900, 100.0, 11.0)) == ("queue_deadline", 1)
    assert refusal(PoolTotals(2, 9, 500, 1500, 900, 10.0, 31.5)) == ("queue_deadline", 22)
    assert refusal(PoolTotals(2, 9, 500, 1500, 900, 10.0, 500.0)) == ("queue_deadline", 60)
    assert refusal(PoolTotals(2, 9, 100, 300, 900, 10.0, 4.5), "low") == ("queue_deadline", 1)
    assert admission.check(PoolTotals(2, 9, 500, 1500, 900, 100.0, 10.0), cost, "high") is None
    # a pace that nobody has measured yet refuses nobody
    assert admission.check(PoolTotals(2, 9, 500, 1500, 900, None, None), cost, "high") is None
