"""One pool as `GET /pools` shows it and metrics count it: plain data, as this ingress sees it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_spec import PoolSpec

RetryOutcome = Literal["restarted", "resumed", "failed"]
"""Of a request whose replica failed: begun again elsewhere, gone on with elsewhere, or told to its client."""


@dataclass(frozen=True)
class ReplicaState:
    """One replica."""

    name: str
    outstanding_tokens: int
    """As this ingress estimates them: reported, and sent since."""
    load: ReplicaLoad | None
    """Its last report."""


@dataclass(frozen=True)
class PoolState:
    """One pool."""

    spec: PoolSpec
    replicas: tuple[ReplicaState, ...]
    budget_tokens: int
    outstanding_tokens: int
    queued_tokens: int
    own_requests: int
    """In flight through this ingress."""
    tokens_per_s: float | None
    queue_wait_s: float | None
    """What a request of now would wait; None while the pool's speed is not known."""
    decisions: Mapping[str, int]
    rejections: Mapping[tuple[str, str], int]
    """By (reason, priority)."""
    prefix_hits: int
    retries: Mapping[RetryOutcome, int] = field(default_factory=dict)
    unnamed_load: ReplicaLoad | None = None
    """A load whose replica is not known, where reports have no name."""

    @property
    def max_queue_age_s(self) -> float:
        ages = [one.load.queue_age_s for one in self.replicas if one.load is not None]
        return max(ages, default=0.0)


def as_json(state: PoolState) -> dict[str, object]:
    """One pool as JSON's own types."""
    spec = state.spec
    rejections: dict[str, dict[str, int]] = {}
    for (reason, priority), count in sorted(state.rejections.items()):
        rejections.setdefault(reason, {})[priority] = count
    return {
        "name": spec.name,
        "bucket": {"above": spec.min_prompt_tokens, "max_prompt_tokens": spec.max_prompt_tokens},
        "tensor_parallel_size": spec.tensor_parallel_size,
        "borrows": list(spec.borrows),
        "replicas": {
            "min": spec.replicas.min,
            "max": spec.replicas.max,
            "up": len(state.replicas),
            "list": [_replica_json(replica) for replica in state.replicas],
        },
        "budget": {"tokens": state.budget_tokens, "outstanding_tokens": state.outstanding_tokens},
        "queue": {
            "tokens": state.queued_tokens,
            "age_s": round(state.max_queue_age_s, 3),
            "wait_s": None if state.queue_wait_s is None else round(state.queue_wait_s, 3),
            "tokens_per_s": None if state.tokens_per_s is None else round(state.tokens_per_s, 1),
        },
        "in_flight_here": state.own_requests,
        "decisions": {"own": 0, "borrowed": 0, **state.decisions, "prefix_hits": state.prefix_hits},
        "rejections": rejections,
        "retries": {outcome: state.retries.get(outcome, 0) for outcome in get_args(RetryOutcome)},
    }


def _replica_json(replica: ReplicaState) -> dict[str, object]:
    load = None if replica.load is None else asdict(replica.load)
    return {"name": replica.name, "outstanding_tokens": replica.outstanding_tokens, "load": load}
