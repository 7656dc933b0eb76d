"""Who is told of a plan, and what an error of one rank does to all, with fakes instead of ranks."""

import pytest

from hybridserve.parallel.step_channel.watch import RankFailure
from hybridserve.replicas.engine import sharded_executor
from hybridserve.replicas.engine.plan import StepPlan, StepResult
from hybridserve.replicas.engine.plan_codec import PlanDecoder
from hybridserve.replicas.engine.sharded_executor import ShardedExecutor

PLAN = StepPlan(3, (), 0)


class Runner:
    """Runs plans, or raises `error` when it is told to or when the step is waited for."""

    overlaps = True

    def __init__(self, events: list) -> None:
        self.events, self.error, self.late_error = events, None, None

    def submit(self, plan: StepPlan) -> "Runner":
        self.events.append(("run", plan.step))
        if self.error is not None:
            raise self.error
        return self

    def shutdown(self) -> None:
        self.events.append("end of this rank")

    def result(self) -> StepResult:
        if self.late_error is not None:
            raise self.late_error
        return StepResult()


class Channel:
    """Notes what is sent and counted."""

    def __init__(self, events: list) -> None:
        self.events, self.board, self.decoder = events, self, PlanDecoder()

    def announce(self) -> None:
        self.events.append("announce")

    def send(self, message: bytes) -> None:
        self.events.append(("send", self.decoder.decode(message).step))

    def count(self, taken: int, done: int) -> None:
        self.events.append(("count", taken, done))


class Watch:
    """Finds `found` when it is given time."""

    def __init__(self) -> None:
        self.failure, self.found = None, None

    def wait_for_failure(self, timeout_s: float) -> RankFailure | None:
        self.failure = self.found
        return self.failure

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def parts():
    """(executor, its runner, its watch, events)"""
    events = []
    runner, watch = Runner(events), Watch()
    executor = ShardedExecutor(
        runner,
        Channel(events),
        watch,
        stop=lambda *how: events.append(("stop", *how)),
        free=lambda: events.append("free"),
    )
    return executor, runner, watch, events


def test_the_others_are_told_before_this_rank_begins(parts) -> None:
    executor, _, _, events = parts
    assert executor.overlaps
    step = executor.submit(PLAN)
    assert events == [("count", 1, 0), "announce", ("send", 3), ("run", 3)]
    assert step.result() == StepResult()
    assert events[-1] == ("count", 1, 1)
    executor.check()


@pytest.mark.parametrize("late", [False, True])
def test_another_ranks_end_is_what_is_raised(parts, late) -> None:
    executor, runner, watch, _ = parts
    watch.found = RankFailure(1, 2, "was killed by SIGKILL")
    broken = RuntimeError("connection closed by peer")
    runner.error, runner.late_error = (None, broken) if late else (broken, None)
    with pytest.raises(RankFailure, match="rank 1 of 2 was killed by SIGKILL"):
        executor.submit(PLAN).result()
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        executor.submit(PLAN)
    with pytest.raises(RankFailure, match="rank 1 of 2"):
        executor.check()


def test_what_a_step_gives_after_a_failure_means_nothing(parts) -> None:
    executor, _, watch, _ = parts
    step = executor.submit(PLAN)
    watch.failure = RankFailure(1, 2, "has left")
    with pytest.raises(RankFailure):
        step.result()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyError("a bug")])
def test_an_error_of_this_rank_ends_the_others(parts, error, monkeypatch) -> None:
    """They are in a step that this rank has left: one more would wait for ever."""
    monkeypatch.setattr(sharded_executor, "BLAME_S", 0.0)
    executor, runner, _, events = parts
    runner.error = error
    with pytest.raises(type(error)):
        executor.submit(PLAN)
    assert events[-1] == ("stop", 0.0)
    count = len(events)
    with pytest.raises(RuntimeError, match=f"rank 0 failed: {type(error).__name__}: "):
        executor.submit(PLAN)
    assert len(events) == count


def test_shutdown(parts) -> None:
    executor, _, _, events = parts
    executor.shutdown()
    # what runs here may still read the others' memory, and they this rank's
    assert events == ["end of this rank", ("stop",), "free"]
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        executor.submit(PLAN)
    assert events[1:] == [("stop",), "free"]


def test_what_may_still_run_keeps_its_memory(parts, monkeypatch) -> None:
    executor, runner, _, events = parts

    def fail() -> None:
        raise RuntimeError("the device does not answer")

    monkeypatch.setattr(runner, "shutdown", fail)
    with pytest.raises(RuntimeError, match="does not answer"):
        executor.shutdown()
    assert events == [("stop",)]


def test_a_fork_sends_nothing(parts, monkeypatch) -> None:
    """The ranks would take its plan for one of the process that they belong to, and fail that one."""
    executor, _, _, events = parts
    with monkeypatch.context() as fork:
        fork.setattr(sharded_executor.os, "getpid", lambda: 0)
        for use in (executor.check, lambda: executor.submit(PLAN)):
            with pytest.raises(RuntimeError, match=r"belong to process \d+, of which this one is a fork"):
                use()
    assert events == []
    executor.submit(PLAN)
    assert events[-1] == ("run", 3)


def test_the_others_end_though_this_rank_cannot(parts, monkeypatch) -> None:
    executor, runner, _, events = parts

    def shutdown() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(runner, "shutdown", shutdown)
    with pytest.raises(RuntimeError, match="CUDA error"):
        executor.shutdown()
    assert events == [("stop",)]
