"""Whether a pool takes one more request now, and when a refused client should come back.

Pure arithmetic over a pool's totals. Each ingress replica may always use its own share of a pool's budget,
and others' shares as long as reports say that they leave room.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from hybridserve.cluster.routing.cost import Cost
from hybridserve.cluster.routing.pool_loads import PoolTotals
from hybridserve.cluster.routing.pool_spec import PoolLimits

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
RejectReason = Literal[
    "concurrent_requests",
    "token_budget",
    "priority_share",
    "queue_deadline",
    # of one API key, whatever the pools have room for
    "key_rate",
    "key_tokens",
    "key_concurrency",
]
REJECT_REASONS: tuple[RejectReason, ...] = get_args(RejectReason)

MAX_RETRY_S = 60
# reports are late by a step, so what others leave is not used up to the last token
_COMMON_SHARE = 0.9


@dataclass(frozen=True)
class Refusal:
    """Why a request may not come in."""

    reason: RejectReason
    message: str
    retry_after_s: int


class Admission:
    """One pool's rules in one of `num_ingress` ingress replicas."""

    def __init__(self, pool: str, limits: PoolLimits, num_ingress: int) -> None:
        self._pool = pool
        self._limits = limits
        self._num_ingress = num_ingress
        self._shares = {
            "high": 1.0,
            "normal": limits.normal_priority_share,
            "low": limits.low_priority_share,
        }
        self.max_requests = -(-limits.max_concurrent_requests // num_ingress)
        """In flight through this ingress."""

    def budget(self, totals: PoolTotals) -> int:
        """Outstanding tokens that the whole pool may have."""
        return self._limits.token_budget * max(1, totals.replicas)

    def load_share(self, totals: PoolTotals, cost: Cost) -> float:
        """The share of the budget that would be in use with one more request of this cost."""
        return (totals.outstanding + cost.tokens) / self.budget(totals)

    def check(self, totals: PoolTotals, cost: Cost, priority: Priority) -> Refusal | None:
        """None when the request may come in. An idle pool takes any, whatever it costs."""
        if totals.own_requests >= self.max_requests:
            each = totals.own_outstanding / totals.own_requests
            return self._refusal(
                "concurrent_requests",
                f"{totals.own_requests} requests are in flight, max_concurrent_requests allows "
                f"{self.max_requests}",
                _seconds(each, totals),
            )
        if totals.outstanding == 0:
            return None
        return self._check_budget(totals, cost, priority) or self._check_wait(totals, priority)

    def _check_budget(self, totals: PoolTotals, cost: Cost, priority: Priority) -> Refusal | None:
        budget = self.budget(totals)
        allowed = self._shares[priority] * budget
        own_share = allowed / self._num_ingress
        common = allowed if self._num_ingress == 1 else _COMMON_SHARE * allowed
        if totals.own_outstanding + cost.tokens <= own_share or totals.outstanding + cost.tokens <= common:
            return None
        outstanding = max(totals.outstanding, totals.own_outstanding)
        fits_without_priority = outstanding + cost.tokens <= budget
        return self._refusal(
            "priority_share" if fits_without_priority else "token_budget",
            f"{outstanding} tokens are outstanding, and with this request's {cost.tokens} they would be more "
            f"than the {int(allowed)} that priority {priority} may use of token_budget {budget}",
            _seconds(outstanding + cost.tokens - allowed, totals),
        )

    def _check_wait(self, totals: PoolTotals, priority: Priority) -> Refusal | None:
        wait = totals.queue_wait_s
        allowed = self._shares[priority] * self._limits.queue_deadline_s
        if wait is None or wait <= allowed:
            return None
        return self._refusal(
            "queue_deadline",
            f"prompts of {totals.queued} tokens wait, a new one about {wait:.1f} s, and priority {priority} "
            f"waits at most {allowed:g} s of queue_deadline_s {self._limits.queue_deadline_s:g}",
            wait - allowed,
        )

    def _refusal(self, reason: RejectReason, message: str, seconds: float) -> Refusal:
        """`seconds`: until the request could come in, by what is known."""
        retry = min(max(1, math.ceil(seconds)), MAX_RETRY_S)
        return Refusal(reason, f"pool {self._pool}: {message}; try again in {retry} s", retry)


def _seconds(tokens: float, totals: PoolTotals) -> float:
    """Until the pool has computed that many tokens more; 0 while its speed is not known."""
    return tokens / totals.tokens_per_s if totals.tokens_per_s else 0.0
