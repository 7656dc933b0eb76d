"""One pool as the router and the builder see it, all settings resolved."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaRange:
    """How many replicas a pool may have; fixed when both are equal."""

    min: int
    max: int

    @property
    def fixed(self) -> bool:
        return self.min == self.max


@dataclass(frozen=True)
class PoolLimits:
    """What admission keeps to."""

    max_concurrent_requests: int
    """Requests in flight, over all ingress replicas."""
    token_budget: int
    """Outstanding tokens of one replica."""
    queue_deadline_s: float
    normal_priority_share: float
    low_priority_share: float


@dataclass(frozen=True)
class PoolSpec:
    """A pool; the bucket holds lengths above `min_prompt_tokens` up to `max_prompt_tokens`."""

    name: str
    min_prompt_tokens: int
    max_prompt_tokens: int | None
    """None: no bound."""
    tensor_parallel_size: int
    replicas: ReplicaRange
    borrows: tuple[str, ...]
    """Longer pools that may serve this bucket while they are idle, the nearest first."""
    limits: PoolLimits

    @property
    def bucket(self) -> str:
        """For people: "0-512" or "513 and more"."""
        first = self.min_prompt_tokens + 1 if self.min_prompt_tokens else 0
        return f"{first} and more" if self.max_prompt_tokens is None else f"{first}-{self.max_prompt_tokens}"


def bucket_of(specs: Sequence[PoolSpec], length: int) -> int:
    """Index of the pool whose bucket holds `length` tokens; the last pool's has no bound."""
    for index, spec in enumerate(specs):
        if spec.max_prompt_tokens is None or length <= spec.max_prompt_tokens:
            return index
    raise AssertionError("the last bucket has no bound")
