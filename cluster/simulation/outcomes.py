"""How requests went, simulated or real, and the figures that are made of that. All latencies in seconds."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OK = "ok"
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request after its end. Times count from when it was to be sent, not from when it was."""

    at_s: float
    """When it was to be sent, since the load began."""
    length: int
    """By which the router chose its bucket."""
    prompt_tokens: int
    tokens: int
    """Of the answer, as many as came."""
    first_token_s: float | None
    end_s: float
    end: str = OK
    """`OK`, or in a few words why not, such as "429 token_budget"."""

    @property
    def per_token_s(self) -> float | None:
        """The mean time between two tokens; None of an answer without two."""
        if self.first_token_s is None or self.tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.tokens - 1)


@dataclass(frozen=True)
class Slo:
    """What an answer has to keep to: seconds to its first token, and its mean seconds between tokens."""

    ttft_s: float
    itl_s: float

    def met_by(self, outcome: Outcome) -> bool:
        if outcome.end != OK or outcome.first_token_s is None:
            return False
        return outcome.first_token_s <= self.ttft_s and (outcome.per_token_s or 0.0) <= self.itl_s


@dataclass(frozen=True)
class Quantiles:
    """Of one latency, in seconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None
    count: int


@dataclass(frozen=True)
class BucketFigures:
    """The requests of one bucket, or all."""

    name: str
    requests: int
    ok: int
    ttft: Quantiles
    itl: Quantiles
    """Of answers' mean times between tokens."""
    e2e: Quantiles
    goodput_per_s: float
    """Answers within the objective, a second."""
    goodput_share: float
    """Of all requests that were sent, refused ones too."""
    ends: dict[str, int]
    """How many did not end well, by why."""


@dataclass(frozen=True)
class Figures:
    """A whole run."""

    seconds: float
    """From the first intended arrival to the last end."""
    prompt_tokens_per_s: float
    answer_tokens_per_s: float
    """Of requests that ended well."""
    buckets: tuple[BucketFigures, ...]
    """Each bucket's, and in the end those of all together."""

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens_per_s + self.answer_tokens_per_s


def quantile(ordered: Sequence[float], q: float) -> float:
    """The least value that at least a share `q` of all does not exceed. `ordered` ascends and has values."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def quantiles(values: Sequence[float]) -> Quantiles:
    if not values:
        return Quantiles(None, None, None, 0)
    ordered = sorted(values)
    return Quantiles(*(quantile(ordered, q) for q in QUANTILES), len(ordered))


def bucket_names(edges: Sequence[int]) -> list[str]:
    """For people, of buckets that end at these lengths and one above: ["0-256", "257 and more"]."""
    starts = [0, *(edge + 1 for edge in edges)]
    return [f"{start}-{edge}" for start, edge in zip(starts, edges, strict=False)] + [
        f"{starts[-1]} and more"
    ]


def figures(outcomes: Sequence[Outcome], edges: Sequence[int], slo: Slo) -> Figures:
    """The figures of a run. `edges`: the longest of each bucket but the last, ascending."""
    seconds = 0.0
    if outcomes:
        seconds = max(one.at_s + one.end_s for one in outcomes) - min(one.at_s for one in outcomes)
    by_bucket: list[list[Outcome]] = [[] for _ in range(len(edges) + 1)]
    for one in outcomes:
        by_bucket[sum(one.length > edge for edge in edges)].append(one)
    named = list(zip(bucket_names(edges), by_bucket, strict=True)) if edges else []
    good = [one for one in outcomes if one.end == OK]
    return Figures(
        seconds,
        _rate(sum(one.prompt_tokens for one in good), seconds),
        _rate(sum(one.tokens for one in good), seconds),
        tuple(_of_bucket(name, some, slo, seconds) for name, some in [*named, ("all", list(outcomes))]),
    )


def _of_bucket(name: str, outcomes: list[Outcome], slo: Slo, seconds: float) -> BucketFigures:
    good = [one for one in outcomes if one.end == OK]
    met = sum(map(slo.met_by, good))
    return BucketFigures(
        name,
        len(outcomes),
        len(good),
        ttft=quantiles([one.first_token_s for one in good if one.first_token_s is not None]),
        itl=quantiles([each for one in good if (each := one.per_token_s) is not None]),
        e2e=quantiles([one.end_s for one in good]),
        goodput_per_s=_rate(met, seconds),
        goodput_share=met / len(outcomes) if outcomes else 0.0,
        ends=dict(Counter(one.end for one in outcomes if one.end != OK)),
    )


def _rate(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
