"""A counter and a histogram that cost next to nothing to count with: for what is counted once a token.

Prometheus' own take a lock, check and look up for each observation, together some microseconds; here one
thread counts in plain numbers, and families are made when somebody scrapes. Used as Prometheus' own are.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class FastCounter(Collector):
    """Counts on one thread.

    labelnames: with them, count on what `labels` gives.
    """

    def __init__(
        self, name: str, documentation: str, labelnames: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._family = (name, documentation)
        self._labelnames = tuple(labelnames)
        self._children: dict[tuple[str, ...], CounterChild] = {}
        self.inc = self.labels().inc if not labelnames else None
        registry.register(self)

    def labels(self, *values: str) -> "CounterChild":
        """What counts for these values; worth keeping."""
        assert len(values) == len(self._labelnames), (values, self._labelnames)
        return self._children.setdefault(values, CounterChild())

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(*self._family, labels=self._labelnames)
        for values, child in self._children.items():
            family.add_metric(values, child.total)
        yield family


class CounterChild:
    """The count of one set of labels."""

    def __init__(self) -> None:
        self.total = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.total += amount


class FastHistogram(Collector):
    """Observes on one thread.

    Args:
        labelnames: with them, observe on what `labels` gives.
        buckets: upper bounds, ascending; infinity comes by itself.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        labelnames: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._family = (name, documentation)
        self._labelnames = tuple(labelnames)
        self._bounds = tuple(map(float, buckets))
        self._children: dict[tuple[str, ...], HistogramChild] = {}
        self.observe = self.labels().observe if not labelnames else None
        registry.register(self)

    def labels(self, *values: str) -> "HistogramChild":
        """What observes for these values; worth keeping."""
        assert len(values) == len(self._labelnames), (values, self._labelnames)
        return self._children.setdefault(values, HistogramChild(self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(*self._family, labels=self._labelnames)
        for values, child in self._children.items():
            family.add_metric(values, child.buckets(), child.sum)
        yield family


class HistogramChild:
    """The observations of one set of labels."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """A value that equals a bound belongs below it, as Prometheus' buckets say."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, observations up to it), as they are shown."""
        shown, total = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            shown.append((bound, total))
        return shown
