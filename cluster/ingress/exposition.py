"""One scrape for all ingress replicas: a proxy hands `GET /metrics` to any of them, the answer is of all.

Each ingress replica's own counts keep a label of its name instead of being added up: a sum over those that
happened to answer would fall when one does not, and a counter that falls looks like a restart, whose rate is
a spike. With the label, one that is missing is a gap in its own series. Prometheus adds up, as in
`sum by (pool) (rate(...))`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
INGRESS_LABEL = "ingress"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Family:
    """One metric: its samples as (name, labels, value)."""

    name: str
    text: str
    type: str
    samples: tuple[tuple[str, Labels, float], ...]


@dataclass(frozen=True)
class Snapshot:
    """What one ingress replica knows, as plain data that travels between them."""

    ingress: str
    shared: tuple[Family, ...]
    """Of pools and replicas: others say the same, as far as they have heard."""
    own: tuple[Family, ...]
    """Its own counts, with its label."""


def snapshot(ingress: str, shared: CollectorRegistry, own: CollectorRegistry) -> Snapshot:
    label = ((INGRESS_LABEL, ingress),)
    return Snapshot(ingress, tuple(_families(shared, ())), tuple(_families(own, label)))


def merge(snapshots: Sequence[Snapshot]) -> bytes:
    """The text of a scrape. Of series that several have, that of the one which knows most counts: an ingress
    replica that has just started has not heard of all of the pools' replicas."""
    merged: dict[str, Metric] = {}
    seen: set[tuple[str, Labels]] = set()
    for one in sorted(snapshots, key=_known, reverse=True):
        for family in (*one.shared, *one.own):
            metric = merged.setdefault(family.name, Metric(family.name, family.text, family.type))
            for name, labels, value in family.samples:
                if (name, labels) not in seen:
                    seen.add((name, labels))
                    metric.add_sample(name, dict(labels), value)
    return generate_latest(_Collected(merged))


def _known(one: Snapshot) -> int:
    return sum(len(family.samples) for family in one.shared)


class _Collected(CollectorRegistry):
    """Metrics that are there already, as a registry."""

    def __init__(self, metrics: dict[str, Metric]) -> None:
        super().__init__()
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics.values()


def _families(registry: CollectorRegistry, extra: Labels) -> Iterator[Family]:
    for metric in registry.collect():
        samples = tuple(
            (sample.name, (*sample.labels.items(), *extra), sample.value)
            for sample in metric.samples
            # when each series began, which no query asks for and doubles what is sent
            if not sample.name.endswith("_created")
        )
        yield Family(metric.name, metric.documentation, metric.type, samples)
