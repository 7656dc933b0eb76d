"""An ingress' view of a pool against the truth: random requests, reports and ends on made-up replicas."""

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridserve.cluster.routing.cost import Backlog, Cost, cost_of
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.prefixes import PREFIX_TOKENS, LastReplicas, prefix_of
from hybridserve.cluster.routing.rates import TokenRate

costs = st.builds(Cost, st.integers(1, 500), st.integers(1, 300))


def report(backlog: Backlog) -> ReplicaLoad:
    return ReplicaLoad(
        *[0] * 11,
        outstanding_tokens=backlog.outstanding_tokens,
        queued_tokens=backlog.queued_tokens,
        progressed_tokens=backlog.progressed_tokens,
        started_tokens=backlog.started_tokens,
    )


class OneIngress(RuleBasedStateMachine):
    """One ingress, whose replicas report after everything that happens to them."""

    @initialize(replicas=st.integers(1, 4))
    def start(self, replicas: int) -> None:
        self.loads = PoolLoads(random.Random(0))
        self.truth = {f"r{i}": Backlog() for i in range(replicas)}
        self.loads.set_replicas(self.truth)
        self.where: dict[str, str] = {}
        self.pending: list[tuple[str, Cost]] = []
        self.costs: dict[str, Cost] = {}
        """What is left of each, when it was last sent, and since then to have been done."""
        self.done: Counter[str] = Counter()
        self.failed: dict[str, set[str]] = {}
        self.count = 0

    def tell(self, replica: str) -> None:
        self.loads.observe(replica, report(self.truth[replica]))

    @rule(cost=costs, prefix=st.none() | st.integers(0, 3))
    def send(self, cost: Cost, prefix: int | None) -> None:
        name = f"q{self.count}"
        self.count += 1
        self.loads.book(name, cost, prefix)
        before = {one: self.loads.outstanding(one) for one in self.truth}
        ranked = self.loads.choose(list(self.truth), name)
        assert sorted(ranked) == sorted(self.truth)
        slack = PREFIX_TOKENS if prefix is not None else 0
        assert before[ranked[0]] <= min(before.values()) + slack
        # counted at once, so that the next choice knows
        assert self.loads.outstanding(ranked[0]) == before[ranked[0]] + cost.tokens
        self.where[name] = ranked[0]
        self.costs[name] = cost
        self.pending.append((name, cost))

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        name, cost = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        replica = data.draw(st.sampled_from([self.where[name], *self.truth]))
        # Serve may have sent it elsewhere than we chose
        self.loads.routed(name, replica)
        self.where[name] = replica
        self.truth[replica].add(name, cost)
        self.tell(replica)
        self.loads.accepted(name)

    def running(self) -> list[str]:
        waiting = {name for name, _ in self.pending}
        return [name for name in self.where if name not in waiting]

    @precondition(lambda self: self.running())
    @rule(data=st.data(), tokens=st.integers(1, 200))
    def progress(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(self.running()))
        self.truth[self.where[name]].progress(name, tokens)
        self.loads.progress(name, tokens)
        self.done[name] += tokens
        self.tell(self.where[name])

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        """It is sent again, its prompt counted anew, and not to where it failed if there is another one."""
        name = data.draw(st.sampled_from(self.running()))
        replica, cost = self.where[name], self.costs[name]
        self.truth[replica].end(name)
        assert self.loads.replica_of(name) == replica
        assert self.loads.failed(name) == replica
        assert self.loads.replica_of(name) is None
        assert self.loads.failed(name) is None
        if len(self.truth) > 1:
            # nor is anybody else, until it is heard of again
            self.loads.book("other", Cost(1, 1))
            assert self.loads.choose(list(self.truth), "other")[-1] == replica
            self.loads.end("other")
        self.tell(replica)
        ranked = self.loads.choose(list(self.truth), name)
        failed = self.failed.setdefault(name, set())
        failed.add(replica)
        assert sorted(ranked) == sorted(self.truth) and (ranked[0] not in failed or failed == {*self.truth})
        self.where[name] = ranked[0]
        left = Cost(cost.prompt_tokens, max(0, cost.answer_tokens - self.done.pop(name, 0)))
        self.costs[name] = left
        self.pending.append((name, left))

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.where)))
        replica = self.where.pop(name)
        self.pending = [(other, cost) for other, cost in self.pending if other != name]
        self.truth[replica].end(name)
        self.loads.end(name)
        self.loads.end(name)
        self.tell(replica)

    @invariant()
    def estimates_are_the_truth_and_what_is_on_its_way(self) -> None:
        if not hasattr(self, "truth"):
            return
        on_its_way = dict.fromkeys(self.truth, 0)
        for name, cost in self.pending:
            on_its_way[self.where[name]] += cost.tokens
        for replica, backlog in self.truth.items():
            assert self.loads.outstanding(replica) == backlog.outstanding_tokens + on_its_way[replica]
        totals = self.loads.totals()
        everything = sum(one.outstanding_tokens for one in self.truth.values()) + sum(on_its_way.values())
        assert totals.outstanding == totals.own_outstanding == everything
        unsent = sum(cost.prompt_tokens for _, cost in self.pending)
        assert totals.queued == sum(one.queued_tokens for one in self.truth.values()) + unsent
        assert totals.own_requests == len(self.where)


TestOneIngress = OneIngress.TestCase
TestOneIngress.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_wait_goes_by_the_pace_of_this_queue_at_the_emptiest_replica() -> None:
    now = 0.0
    loads = PoolLoads(clock=lambda: now)
    loads.set_replicas(["a", "b"])
    backlogs = {"a": Backlog(), "b": Backlog()}
    assert loads.totals().queue_wait_s == 0.0

    def tell() -> None:
        for name, backlog in backlogs.items():
            loads.observe(name, report(backlog))

    for index in range(40):
        # long answers say nothing of how long a prompt waits
        backlogs["ab"[index % 2]].add(str(index), Cost(100, 10_000))
    tell()
    assert loads.totals().queue_wait_s is None
    # a starts 200 tokens of prompts a second, b 100
    for index in range(0, 20, 2):
        now += 0.5
        backlogs["a"].progress(str(index), 1)
        if index % 4 == 0:
            backlogs["b"].progress(str(index + 1), 1)
        tell()
    # a has 1,000 tokens in its queue, b 1,500
    wait = loads.totals().queue_wait_s
    assert wait is not None and 4.5 < wait < 5.5
    for index in range(20, 40, 2):
        backlogs["a"].progress(str(index), 1)
    tell()
    assert loads.totals().queue_wait_s == 0.0
    # what held that queue up may not hold up the next
    backlogs["a"].add("next", Cost(5000, 5))
    tell()
    assert loads.totals().queue_wait_s is None


def test_without_reports_it_counts_its_own() -> None:
    loads = PoolLoads(random.Random(0))
    loads.set_replicas(["a", "b"])
    for name in "wxyz":
        loads.book(name, Cost(10, 10))
        loads.choose(["a", "b"], name)
    assert (loads.outstanding("a"), loads.outstanding("b")) == (40, 40)
    loads.progress("w", 5)
    assert loads.totals().outstanding == 65
    for name in "wxyz":
        loads.end(name)
    assert loads.totals().outstanding == 0


def test_a_prefix_goes_where_it_was_unless_that_costs_more_than_it_saves() -> None:
    loads = PoolLoads(random.Random(0))
    loads.set_replicas(["a", "b"])
    loads.book("first", Cost(200, 10), prefix=7)
    [home, other] = loads.choose(["a", "b"], "first")
    loads.end("first")
    loads.book("small", Cost(50, 50))
    loads.routed("small", home)
    loads.book("second", Cost(200, 10), prefix=7)
    assert loads.choose(["a", "b"], "second")[0] == home
    loads.book("third", Cost(200, 10), prefix=7)
    assert loads.choose(["a", "b"], "third")[0] == other
    assert loads.prefix_hits == 1
    # and there it is from now on
    assert loads.choose([other], "third") == [other]


def test_ties_are_broken_at_random() -> None:
    firsts = set()
    for seed in range(20):
        loads = PoolLoads(random.Random(seed))
        firsts.add(loads.choose(["a", "b", "c"], None)[0])
    assert firsts == {"a", "b", "c"}


def test_replicas_that_go_and_connections_that_end_are_forgotten() -> None:
    loads = PoolLoads()
    backlog = Backlog()
    backlog.add("x", Cost(5, 5))
    loads.set_replicas(["a", "b"])
    for name in ("a", "b"):
        loads.observe(name, report(backlog))
    loads.forget("b")
    assert (loads.totals().replicas, loads.totals().outstanding) == (2, 10)
    loads.set_replicas(["b"])
    # a replica that is being stopped still reports
    loads.observe("a", report(backlog))
    assert (loads.totals().replicas, loads.totals().outstanding) == (1, 0)
    assert loads.replicas() == ["b"]


@given(st.lists(st.tuples(costs, st.lists(st.integers(1, 100), max_size=5)), max_size=8), st.randoms())
def test_a_backlog_ends_empty_and_counts_every_token(
    requests: list[tuple[Cost, list[int]]], rng: random.Random
) -> None:
    now = 0.0
    backlog = Backlog(lambda: now)
    for index, (cost, _) in enumerate(requests):
        now = float(index)
        backlog.add(str(index), cost)
    events = [(index, tokens) for index, (_, steps) in enumerate(requests) for tokens in steps]
    rng.shuffle(events)
    for index, tokens in events:
        backlog.progress(str(index), tokens)
        assert 0 <= backlog.queued_tokens <= backlog.outstanding_tokens
    waiting = [index for index, (_, steps) in enumerate(requests) if not steps]
    assert backlog.queue_age_s() == (now - waiting[0] if waiting else 0.0)
    assert backlog.queued_tokens == sum(requests[index][0].prompt_tokens for index in waiting)
    assert backlog.started_tokens == sum(cost.prompt_tokens for cost, steps in requests if steps)
    started = [cost.prompt_tokens + sum(steps) for cost, steps in requests if steps]
    assert backlog.progressed_tokens == sum(started)
    for index in range(len(requests)):
        backlog.end(str(index))
    assert (backlog.outstanding_tokens, backlog.queued_tokens, backlog.queue_age_s()) == (0, 0, 0.0)


def test_an_answer_weighs_what_was_asked_for_or_what_is_usual() -> None:
    assert cost_of(10, 4000, None) == Cost(10, 256)
    assert cost_of(10, 16, None) == Cost(10, 16)
    assert cost_of(10, 4000, 4000) == Cost(10, 4000)


def test_prefixes() -> None:
    long = tuple(range(PREFIX_TOKENS))
    assert prefix_of(long[:-1]) is None
    assert prefix_of(long) == prefix_of([*long, 5]) != prefix_of([1, *long])
    last = LastReplicas(max_prefixes=2)
    for prefix in (1, 2, 1, 3):
        last.put(prefix, f"r{prefix}")
    assert [last.get(prefix) for prefix in (None, 1, 2, 3)] == [None, "r1", None, "r3"]


def test_a_rate_is_of_busy_time_alone() -> None:
    rate = TokenRate()
    now, tokens = 0.0, 0
    for _ in range(100):
        rate.observe(now, tokens, busy=True)
        now, tokens = now + 0.1, tokens + 50
    assert rate.tokens_per_s is not None and abs(rate.tokens_per_s - 500) < 1
    rate.observe(now, tokens, busy=False)
    for _ in range(100):
        now += 0.1
        rate.observe(now, tokens, busy=False)
    rate.observe(now, tokens, busy=True)
    for _ in range(10):
        now, tokens = now + 0.1, tokens + 50
        rate.observe(now, tokens, busy=True)
    assert abs(rate.tokens_per_s - 500) < 5


def test_a_long_prompt_counts_when_it_is_done_and_its_time_with_it() -> None:
    rate = TokenRate()
    for now in (0.0, 1.0, 2.0, 3.0):
        rate.observe(now, 0, busy=True)
        assert rate.tokens_per_s is None
    rate.observe(4.0, 2000, busy=True)
    assert rate.tokens_per_s == 500
