"""Where to cut two buckets, and how to share the replicas between them: every way simulated with one load."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.simulation.cluster import ClusterModel, SimulatedCluster
from hybridserve.cluster.simulation.merging import MERGED
from hybridserve.cluster.simulation.outcomes import OK, Outcome, quantile
from hybridserve.cluster.simulation.workload import Arrival

# a little earlier for short requests is not worth what it may cost the long ones
_NEAR = 1.25

ModelOf = Callable[[AppSettings], ClusterModel]


@dataclass(frozen=True)
class Way:
    """One way to run the replicas, and what it gave. Times in seconds."""

    cut: int | None
    """The longest of the short bucket; None: one merged pool."""
    short_replicas: int
    long_replicas: int
    tokens_per_s: float
    served_share: float
    short_p50_s: float | None
    """To the first token, of requests up to the length that was asked about."""
    short_p99_s: float | None
    bucket_p99_s: float | None
    """Of all requests up to the cut."""
    bucket_merged_p99_s: float | None
    """Of the same ones in the merged pool."""
    long_p99_s: float | None
    """Of all above the cut."""
    long_merged_p99_s: float | None
    all_p99_s: float | None


@dataclass(frozen=True)
class Sweep:
    """All ways, the merged pool first, and the best of them."""

    short: int
    floor: float
    """The least share of the merged pool's tokens a second."""
    ways: tuple[Way, ...]
    best: Way | None
    """Of those above the floor and with short requests' first tokens about as early as any way's, the one
    that delays the others least; None: none is above the floor."""


def sweep_cuts(
    args: Mapping[str, object],
    model_of: ModelOf,
    arrivals: Sequence[Arrival],
    cuts: Sequence[int],
    *,
    replicas: int,
    short: int | None = None,
    floor: float = 0.95,
    seed: int = 0,
    on_way: Callable[[Way], None] = lambda way: None,
) -> Sweep:
    """Simulate the merged pool, and for each cut the splits of the replicas that its load suggests.

    Args:
        args: a deployment's; the limits are those of its first pool, for all pools.
        short: the longest of the requests whose first tokens decide; by default the smallest cut.
        on_way: is told of each as it is known.

    Raises:
        ValueError: a cut, `short` or the number of replicas will not do.
    """
    if replicas < 2:
        raise ValueError(f"replicas must be at least 2 to be shared by two buckets, got {replicas}")
    if not cuts or min(cuts) < 1:
        raise ValueError(f"cuts must be positive lengths, got {list(cuts)}")
    short = min(cuts) if short is None else short
    if short < 1:
        raise ValueError(f"short must be a positive length, got {short}")

    def run(pools: list[dict[str, object]]) -> list[Outcome]:
        settings = AppSettings.model_validate(_with_pools(args, pools))
        return SimulatedCluster(model_of(settings), seed).run(arrivals).outcomes

    merged = run([{"name": MERGED, "replicas": replicas}])
    ways = [_way(None, replicas, 0, short, merged, merged)]
    on_way(ways[0])
    for cut in sorted(set(cuts)):
        for count in _splits(arrivals, cut, replicas):
            pools = [
                {"name": "short", "max_prompt_tokens": cut, "replicas": count},
                {"name": "long", "replicas": replicas - count},
            ]
            ways.append(_way(cut, count, replicas - count, short, run(pools), merged))
            on_way(ways[-1])
    return Sweep(short, floor, tuple(ways), best_way(ways, floor))


def best_way(ways: Sequence[Way], floor: float) -> Way | None:
    """See `Sweep.best`; `ways` begins with the merged pool."""
    least = floor * ways[0].tokens_per_s
    able = [way for way in ways[1:] if way.tokens_per_s >= least and way.short_p99_s is not None]
    if not able:
        return None
    enough = _NEAR * min(way.short_p99_s for way in able)
    return min((way for way in able if way.short_p99_s <= enough), key=lambda way: way.all_p99_s)


def _with_pools(args: Mapping[str, object], pools: list[dict[str, object]]) -> dict[str, object]:
    changed = copy.deepcopy(dict(args))
    # all pools alike, so that only the cut differs
    first = (changed.get("pools") or [{}])[0]
    alike = {key: first[key] for key in ("serving", "tensor_parallel_size") if key in first}
    changed["pools"] = [{**alike, **pool} for pool in pools]
    return changed


def _splits(arrivals: Sequence[Arrival], cut: int, replicas: int) -> Iterator[int]:
    """Numbers of short replicas: about the short requests' share of all tokens, or all where they are few."""
    if replicas <= 8:
        yield from range(1, replicas)
        return
    tokens = [one.prompt_tokens + one.answer_tokens for one in arrivals]
    short = sum(count for one, count in zip(arrivals, tokens, strict=True) if one.length <= cut)
    middle = replicas * short / sum(tokens)
    counts = {round(middle * factor) for factor in (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)}
    yield from sorted({min(max(1, count), replicas - 1) for count in counts})


def _way(
    cut: int | None, count: int, rest: int, short: int, outcomes: list[Outcome], merged: list[Outcome]
) -> Way:
    good = [one for one in outcomes if one.end == OK]
    seconds = max(one.at_s + one.end_s for one in outcomes) - min(one.at_s for one in outcomes)
    bound = float("inf") if cut is None else cut
    return Way(
        cut,
        count,
        rest,
        tokens_per_s=sum(one.prompt_tokens + one.tokens for one in good) / seconds,
        served_share=len(good) / len(outcomes),
        short_p50_s=_ttft(outcomes, 0, short, 0.5),
        short_p99_s=_ttft(outcomes, 0, short),
        bucket_p99_s=_ttft(outcomes, 0, bound),
        bucket_merged_p99_s=_ttft(merged, 0, bound),
        long_p99_s=_ttft(outcomes, bound, float("inf")),
        long_merged_p99_s=_ttft(merged, bound, float("inf")),
        all_p99_s=_ttft(outcomes, 0, float("inf")),
    )


def _ttft(outcomes: list[Outcome], above: float, up_to: float, q: float = 0.99) -> float | None:
    times = sorted(
        one.first_token_s
        for one in outcomes
        if one.end == OK and one.first_token_s is not None and above < one.length <= up_to
    )
    return quantile(times, q) if times else None
