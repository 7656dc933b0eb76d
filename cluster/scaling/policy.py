"""How many replicas a pool should have, from its queue, its outstanding tokens and its arenas' use.

Pure: signals and the time in, a number out. Growing is quick and shrinking slow: fewer replicas must be
enough with room to spare, and for a while.
"""

import math
from dataclasses import dataclass

# names of the figures that replicas report to Serve
OUTSTANDING_TOKENS = "outstanding_tokens"
QUEUE_AGE_S = "queue_age_s"
ARENA_USE = "arena_use"

# of each target: what fewer replicas may be loaded with at most before one goes
_SHRINK_BELOW = 0.8
# a queue never asks for more than this many times the replicas there are, in one go
_MAX_GROWTH = 2


@dataclass(frozen=True)
class ScalingRule:
    """One pool's targets."""

    min_replicas: int
    max_replicas: int
    target_tokens: int
    """Outstanding tokens of one replica."""
    max_queue_age_s: float
    max_arena_use: float
    up_after_s: float
    down_after_s: float


@dataclass(frozen=True)
class PoolSignals:
    """What is known of a pool now."""

    replicas: int
    """As wanted so far; some may still be starting."""
    reporting: int
    """Those that say how they do."""
    outstanding_tokens: float
    """Of all replicas."""
    queue_age_s: float
    """The oldest of all replicas' queues."""
    arena_use: float
    """The replicas' mean."""
    unrouted_requests: float = 0.0
    """Requests that wait for any replica at all."""


@dataclass(frozen=True)
class ScalingMemory:
    """Since when more, or fewer, replicas have been wanted; times of the caller's clock."""

    more_since: float | None = None
    fewer_since: float | None = None
    fewer_most: int = 0
    """The most that was wanted since `fewer_since`."""


def wanted_replicas(rule: ScalingRule, signals: PoolSignals) -> int:
    """How many replicas the signals ask for, whatever was before."""
    if signals.replicas == 0:
        wanted = 1 if signals.unrouted_requests > 0 else 0
    else:
        wanted = max(_least(rule, signals, 1.0), _by_queue(rule, signals))
        if wanted < signals.replicas:
            # one that goes leaves its load to the others
            wanted = min(signals.replicas, _least(rule, signals, _SHRINK_BELOW))
    return min(max(wanted, rule.min_replicas), rule.max_replicas)


def _least(rule: ScalingRule, signals: PoolSignals, slack: float) -> int:
    """The fewest replicas that keep tokens and arenas below `slack` times their targets."""
    by_tokens = math.ceil(signals.outstanding_tokens / (slack * rule.target_tokens))
    by_arena = math.ceil(signals.reporting * signals.arena_use / (slack * rule.max_arena_use))
    busy = signals.outstanding_tokens > 0 or signals.unrouted_requests > 0
    return max(by_tokens, by_arena, 1 if busy or rule.min_replicas > 0 else 0)


def _by_queue(rule: ScalingRule, signals: PoolSignals) -> int:
    if signals.queue_age_s <= rule.max_queue_age_s or signals.reporting < signals.replicas:
        # those that are still starting will take their part of the queue
        return 0
    growth = min(signals.queue_age_s / rule.max_queue_age_s, _MAX_GROWTH)
    return max(signals.replicas + 1, math.floor(signals.replicas * growth))


def decide(
    rule: ScalingRule, signals: PoolSignals, memory: ScalingMemory, now: float
) -> tuple[int, ScalingMemory]:
    """The number of replicas to have from now on, and what to remember until the next call."""
    wanted = wanted_replicas(rule, signals)
    if wanted > signals.replicas:
        since = now if memory.more_since is None else memory.more_since
        # from nothing there is nothing to wait for: a client already does
        if signals.replicas == 0 or now - since >= rule.up_after_s:
            return wanted, ScalingMemory()
        return signals.replicas, ScalingMemory(more_since=since)
    if wanted < signals.replicas:
        since = now if memory.fewer_since is None else memory.fewer_since
        most = wanted if memory.fewer_since is None else max(wanted, memory.fewer_most)
        if now - since >= rule.down_after_s:
            return most, ScalingMemory()
        return signals.replicas, ScalingMemory(fewer_since=since, fewer_most=most)
    return signals.replicas, ScalingMemory()
