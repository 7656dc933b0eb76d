"""Who runs a step. `ModelRunner` does it in the engine's own process; shards elsewhere will do it as one."""

from typing import Protocol

from hybridserve.replicas.engine.plan import StepPlan, StepResult


class Executor(Protocol):
    """Runs the plans of one engine, in order."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and draw the next token of every sequence that has a `sample`."""
