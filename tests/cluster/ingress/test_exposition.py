"""One scrape of several ingress replicas."""

from hybridserve.cluster.ingress.exposition import Family, Snapshot, merge


def up(ingress: str, replicas: int, names: tuple[str, ...]) -> Snapshot:
    steps = tuple(("steps_total", (("replica", name),), 5.0) for name in names)
    shared = (
        Family("replicas", "up", "gauge", (("replicas", (("pool", "only"),), float(replicas)),)),
        Family("steps", "taken", "counter", steps),
    )
    own = (Family("answers", "ended", "counter", (("answers_total", (("ingress", ingress),), 1.0),)),)
    return Snapshot(ingress, shared, own)


def test_who_has_heard_of_no_replica_says_nothing_of_the_pools() -> None:
    new, old = up("new", 0, ()), up("old", 2, ("a", "b"))
    for order in ([new, old], [old, new]):
        lines = merge(order).decode().splitlines()
        assert 'replicas{pool="only"} 2.0' in lines
        assert {'steps_total{replica="a"} 5.0', 'steps_total{replica="b"} 5.0'} <= set(lines)
        assert {'answers_total{ingress="new"} 1.0', 'answers_total{ingress="old"} 1.0'} <= set(lines)
