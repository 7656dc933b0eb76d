"""The plain counters say what Prometheus' own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from hybridserve.cluster.ingress.fast_metrics import FastCounter, FastHistogram

BUCKETS = (0.1, 0.5, 2, 10.0)
values = st.floats(0, 20) | st.sampled_from(BUCKETS)


def samples(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    def plain(metric: Metric) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
        return [(one.name, tuple(sorted(one.labels.items())), one.value) for one in metric.samples]

    # when a metric was made is of no interest
    return {one for metric in registry.collect() for one in plain(metric) if not one[0].endswith("_created")}


@given(st.lists(st.tuples(st.sampled_from(["short", "long"]), values), max_size=30))
def test_a_histogram_with_labels(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast = FastHistogram("seconds", "text", ["pool"], buckets=BUCKETS, registry=ours)
    slow = Histogram("seconds", "text", ["pool"], buckets=BUCKETS, registry=theirs)
    for pool, value in observed:
        fast.labels(pool).observe(value)
        slow.labels(pool).observe(value)
    assert samples(ours) == samples(theirs)


@given(st.lists(values, max_size=30))
def test_without_labels(observed: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast, counter = (
        FastHistogram("a", "text", buckets=BUCKETS, registry=ours),
        FastCounter("b", "text", registry=ours),
    )
    slow, slow_counter = (
        Histogram("a", "text", buckets=BUCKETS, registry=theirs),
        Counter("b", "text", registry=theirs),
    )
    for value in observed:
        fast.observe(value)
        counter.inc(value)
        slow.observe(value)
        slow_counter.inc(value)
    assert samples(ours) == samples(theirs)
