"""Who runs a step: `ModelRunner` in the engine's own process, `ShardedExecutor` together with other ranks."""

from typing import Protocol

from hybridserve.replicas.engine.plan import StepPlan, StepResult


class RunningStep(Protocol):
    """A step that was handed over and may not have ended."""

    def result(self) -> StepResult:
        """Wait for the step's end."""


class Executor(Protocol):
    """Runs the plans of one engine, in order."""

    overlaps: bool
    """Whether `submit` returns before the step has ended, so that the next one can be planned meanwhile."""

    def submit(self, plan: StepPlan) -> RunningStep:
        """Compute the plan's tokens and draw the next token of every sequence that has a `sample`.

        The plan's own lists are read before this returns.
        """

    def check(self) -> None:
        """Raise where no plan can be run any more, as another rank is dead or stuck. Costs nothing."""

    def shutdown(self) -> None:
        """Give up what the executor holds outside of this process; no plan may follow."""
