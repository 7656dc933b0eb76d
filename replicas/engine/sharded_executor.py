"""Running a plan on all ranks of a replica: here on rank 0's shard, elsewhere by sending it.

Owns the order: plans leave in the order in which they run, and this process takes part in every one that has
left, or the replica has failed. Knows nothing of how the other ranks were started.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hybridserve.parallel.step_channel.channel import StepChannel
from hybridserve.parallel.step_channel.watch import RankWatch
from hybridserve.replicas.engine.executor import Executor, RunningStep
from hybridserve.replicas.engine.plan import StepPlan, StepResult
from hybridserve.replicas.engine.plan_codec import PlanEncoder

BLAME_S = 4.5
"""How long an error that may be another rank's death waits for the watch to say so."""


class ShardedExecutor:
    """An Executor over this process' shard and all others."""

    def __init__(
        self,
        runner: Executor,
        channel: StepChannel,
        watch: RankWatch,
        stop: Callable[..., None],
        free: Callable[[], None],
    ) -> None:
        """stop: ends the other ranks, at once where it is given 0.0. free: lets go of what this rank shared
        with them, when they have ended and nothing runs here. Both may be called more than once."""
        self.runner = runner
        self.overlaps = runner.overlaps
        self._channel = channel
        self._watch = watch
        self._stop = stop
        self._free = free
        self._encoder = PlanEncoder()
        self._taken = self._done = 0
        self._is_shut_down = False
        self._why = "the engine was shut down"
        self._pid = os.getpid()

    def submit(self, plan: StepPlan) -> RunningStep:
        """See `Executor`.

        Raises:
            RankFailure: a rank is dead or stuck; names it.
        """
        with self._blaming(), uninterrupted():
            self._taken += 1
            self._channel.board.count(self._taken, self._done)
            self._channel.announce()
            self._channel.send(self._encoder.encode(plan))
            return _ShardedStep(self, self.runner.submit(plan))

    def check(self) -> None:
        """Raise what ends the replica, if there is anything. Costs nothing."""
        if os.getpid() != self._pid:
            # a plan sent from here would part the ranks from the process that they belong to
            raise RuntimeError(f"the other ranks belong to process {self._pid}, of which this one is a fork")
        self._watch.check()
        if self._is_shut_down:
            raise RuntimeError(self._why)

    def shutdown(self) -> None:
        """End the other ranks, and free what was shared with them. No plan can be submitted any more."""
        self._is_shut_down = True
        try:
            # first: its last sums may still read the others' memory
            self.runner.shutdown()
        finally:
            self._stop()
        # not where the end of what runs here could not be waited for
        self._free()

    def finish(self, step: RunningStep) -> StepResult:
        """Wait for a step on this rank."""
        with self._blaming():
            result = step.result()
        self._done += 1
        if not self._is_shut_down:
            self._channel.board.count(self._taken, self._done)
        return result

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Raise the failure of a rank instead of what it causes here."""
        self.check()
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError | TimeoutError):
                self._watch.wait_for_failure(BLAME_S)
                self._watch.check()
            # the others take part in a step that this rank has left
            self._why = f"rank 0 failed: {type(error).__name__}: {error}"
            self._is_shut_down = True
            self._stop(0.0)
            raise
        # what a step gives after its group was aborted means nothing
        self._watch.check()


class _ShardedStep:
    def __init__(self, executor: ShardedExecutor, step: RunningStep) -> None:
        self._executor = executor
        self._step = step

    def result(self) -> StepResult:
        return self._executor.finish(self._step)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: what other ranks were told to do has to be done here too."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        # only the main thread is interrupted, and a handler that is not Python's could not be put back
        yield
        return
    caught: list[tuple] = []
    before = signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and callable(before):
        before(*caught[0])
