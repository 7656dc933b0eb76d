"""What a replica says of its load on the token bus, and several replicas' loads as one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from hybridserve.replicas.engine.plan import EngineLoad


@dataclass(frozen=True)
class ReplicaLoad(EngineLoad):
    """An engine's load, and its requests' tokens as the router counts them (from the engine's actor)."""

    outstanding_tokens: int = 0
    """Tokens still to compute of all its requests: prompts without a first token, and answers as expected."""
    queued_tokens: int = 0
    """Tokens of the prompts that wait for their first token."""
    progressed_tokens: int = 0
    """Tokens computed since start, prompts counted whole at their first token."""
    started_tokens: int = 0
    """The part of `progressed_tokens` that are prompts'."""
    queue_age_s: float = 0.0
    """Seconds since the oldest request without a first token was taken."""

    @property
    def arena_use(self) -> float:
        """The share of the arena that is in use, from 0 to 1."""
        units = self.units_used / self.units_total if self.units_total else 0.0
        pages = self.pages_used / self.pages_total if self.pages_total else 0.0
        return min(1.0, units + pages)


def sum_loads(loads: Sequence[ReplicaLoad]) -> ReplicaLoad:
    """Several replicas' loads as one; times (`step_ms`, `queue_age_s`) are the longest's."""
    summed = {field.name: sum(getattr(load, field.name) for load in loads) for field in fields(ReplicaLoad)}
    longest = {name: max(getattr(load, name) for load in loads) for name in ("step_ms", "queue_age_s")}
    return ReplicaLoad(**{**summed, **longest})
