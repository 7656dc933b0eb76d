"""The dashboard, the alerts and the runbook name only metrics and labels that a live `/metrics` has."""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hybridserve.cluster.ingress.app import build_api
from hybridserve.cluster.ingress.options import IngressOptions
from hybridserve.cluster.observe.trail import current_answer
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest, PoolError
from hybridserve.cluster.routing.admission import Admission
from hybridserve.cluster.routing.length_router import LengthRouter, RoutedPool
from hybridserve.cluster.routing.load import ReplicaLoad
from hybridserve.cluster.routing.pool_loads import PoolLoads
from hybridserve.cluster.routing.pool_spec import PoolLimits, PoolSpec, ReplicaRange
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.text.tokenizer import Tokenizer

Labels = dict[str, set[str]]
"""Of every sample's name, its labels."""

# what Prometheus adds to every series itself
_ADDED = {"job", "instance"}
_SUBSTITUTES = {"$__rate_interval": "1m", "$pool": ".*"}


class OnePool:
    """A pool's client that answers two tokens, at the second attempt when told so."""

    def __init__(self) -> None:
        self.broken = False

    async def info(self) -> EngineInfo:
        return EngineInfo("fake", 8192, 256, 8, "float32", "cpu")

    async def ready(self) -> bool:
        return True

    def pools(self) -> list[object]:
        return []

    def load(self) -> ReplicaLoad | None:
        return None

    async def refresh_load(self) -> None:
        """Nothing to ask."""

    async def generate(self, request: GenerationRequest):
        current_answer().attempt = 2
        if self.broken:
            raise PoolError("gone")
        yield EngineOutput(request.request_id, 0)
        yield EngineOutput(request.request_id, 0, (5,), first_scheduled_time=1.0)
        yield EngineOutput(request.request_id, 1, (6,), finish_reason="length")


@pytest.fixture(scope="module")
def live(demo_model: Path) -> Labels:
    """Of a router and an ingress in this process that have seen requests go well, refused and broken."""
    limits = PoolLimits(8, 40, 10.0, 0.9, 0.5)
    spec = PoolSpec("only", 0, None, 1, ReplicaRange(1, 2), (), limits)
    ticks = itertools.count()
    loads = PoolLoads(clock=lambda: float(next(ticks)))
    loads.set_replicas(["a"])
    load = ReplicaLoad(3, 4, 500, 5, 6, 70, 80, 9, 12.5, 11, 1000, 10, 2, 9000, 700, 1.5)
    loads.observe("a", load)
    client = OnePool()
    router = LengthRouter([RoutedPool(spec, client, loads, Admission("only", limits, 1))])
    api = build_api(router, Tokenizer.load(demo_model), IngressOptions(model_name="demo"), {})

    async def exercise() -> str:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as http:
            small = {"prompt": [1], "max_tokens": 2}
            assert (await http.post("/v1/completions", json=small)).status_code == 200
            large = {"prompt": [1] * 30, "max_tokens": 100}
            assert (await http.post("/v1/completions", json=large)).status_code == 429
            client.broken = True
            assert (await http.post("/v1/completions", json=small)).status_code == 503
            # more reports, so that there is a pace
            for index in range(1, 9):
                progress = {"progressed_tokens": 9000 + 100 * index, "started_tokens": 700 + 10 * index}
                loads.observe("a", replace(load, **progress))
            return (await http.get("/metrics")).text

    labels: Labels = {}
    for family in text_string_to_metric_families(asyncio.run(exercise())):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def selectors(node: object) -> Iterator[promql_parser.VectorSelector]:
    """Every selector of an expression."""
    found: list[promql_parser.VectorSelector] = []

    def visit(one: promql_parser.Expr) -> bool:
        if isinstance(one, promql_parser.VectorSelector):
            found.append(one)
        return True

    promql_parser.walk(node, pre_visit=visit)
    return iter(found)


def problems(expr: str, live: Labels) -> list[str]:
    """What the expression asks for that is not there: metrics, matched labels, labels that it groups by."""
    for name, value in _SUBSTITUTES.items():
        expr = expr.replace(name, value)
    tree = promql_parser.parse(expr)
    wrong, known = [], set()
    for selector in selectors(tree):
        if selector.name not in live:
            wrong.append(f"no metric {selector.name}")
            continue
        known |= live[selector.name]
        labels = live[selector.name] | _ADDED
        for matcher in selector.matchers.matchers:
            if matcher.name not in labels:
                wrong.append(f"{selector.name} has no label {matcher.name}")
    for grouping in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expr):
        for label in filter(None, map(str.strip, grouping.split(","))):
            if label not in known | _ADDED:
                wrong.append(f"no label {label} in {expr}")
    return wrong


@pytest.fixture(scope="module")
def dashboard(repo_root: Path) -> dict:
    return json.loads((repo_root / "configs/monitoring/grafana-dashboard.json").read_text())


def queries(dashboard: dict) -> list[tuple[str, str, str]]:
    """(panel, expression, legend) of every query."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def test_the_check_finds_what_is_not_there(live: Labels) -> None:
    assert problems("sum(rate(hybridserve_nothing_total[5m]))", live) == [
        "no metric hybridserve_nothing_total"
    ]
    assert problems('hybridserve_pool_replicas{shard="1"}', live) == [
        "hybridserve_pool_replicas has no label shard"
    ]
    assert problems("sum by (shard) (hybridserve_pool_replicas)", live)
    with pytest.raises(ValueError):
        problems("sum by (pool (hybridserve_pool_replicas)", live)


def test_every_query_of_the_dashboard_has_an_answer(dashboard: dict, live: Labels) -> None:
    asked = queries(dashboard)
    assert len(asked) > 30
    wrong = {f"{title}: {expr}": problems(expr, live) for title, expr, _ in asked}
    assert {query: found for query, found in wrong.items() if found} == {}
    variables = [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    for definition in variables:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", definition).groups()
        assert label in live[metric]


def test_legends_show_labels_that_are_left(dashboard: dict, live: Labels) -> None:
    for title, expr, legend in queries(dashboard):
        shown = set(re.findall(r"{{(\w+)}}", legend))
        grouped = re.search(r"sum by \(([^)]*)\)", expr)
        if grouped:
            left = {label.strip() for label in grouped[1].split(",")}
        else:
            left = set.union(*(live[name] for name in live if re.search(rf"\b{name}\b", expr)))
        assert shown <= left, title


def test_the_dashboard_shows_every_metric(dashboard: dict, live: Labels) -> None:
    """What nobody looks at need not be counted."""
    text = "\n".join(expr for _, expr, _ in queries(dashboard))
    ours = {
        name for name in live if name.startswith("hybridserve_") and not re.search(r"_(sum|count)$", name)
    }
    # shown by pool; a replica's own is in GET /pools
    unseen = {"hybridserve_queue_age_seconds", "hybridserve_tokens_waiting"}
    assert {name for name in ours if name not in text} == unseen


def test_the_dashboard_is_what_grafana_imports(dashboard: dict) -> None:
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    [wanted] = dashboard["__inputs"]
    assert (wanted["type"], wanted["pluginId"]) == ("datasource", "prometheus")
    assert {one["type"] for one in dashboard["__requires"]} >= {"grafana", "datasource", "panel"}
    variables = {one["name"]: one for one in dashboard["templating"]["list"]}
    assert variables["datasource"]["current"]["value"] == f"${{{wanted['name']}}}"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, f"{panel['title']} lies on another panel"
        places |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Queue and admission", "Memory", "Engine", "Scaling", "Errors"]


@pytest.fixture(scope="module")
def alerts(repo_root: Path) -> list[dict]:
    content = yaml.safe_load((repo_root / "configs/monitoring/prometheus-alerts.yaml").read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def test_every_alert_can_fire_and_is_in_the_runbook(
    alerts: list[dict], live: Labels, repo_root: Path
) -> None:
    runbook = (repo_root / "docs" / "operations.md").read_text()
    for rule in alerts:
        assert problems(rule["expr"], live) == [], rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"`{rule['alert']}`" in runbook


def test_the_runbook_lists_every_metric(live: Labels, repo_root: Path) -> None:
    """With its labels, and no other."""
    runbook = (repo_root / "docs" / "operations.md").read_text()
    listed = {
        name: set(filter(None, re.split(r",\s*", labels)))
        for name, labels in re.findall(r"^\| `(hybridserve_\w+)` \| ([^|]*?) \|", runbook, re.MULTILINE)
    }
    families: Labels = {}
    for name, labels in live.items():
        if name.startswith("hybridserve_"):
            family = re.sub(r"_(bucket|sum|count)$", "", name)
            families.setdefault(family, set()).update(labels - {"le"})
    assert listed == families


def test_the_scrape_configuration_names_the_alerts(repo_root: Path) -> None:
    folder = repo_root / "configs" / "monitoring"
    content = yaml.safe_load((folder / "prometheus.yaml").read_text())
    assert all((folder / name).is_file() for name in content["rule_files"])
    ours = {job["job_name"]: job for job in content["scrape_configs"]}["hybridserve"]
    serve = yaml.safe_load((repo_root / "configs" / "demo.yaml").read_text())
    assert ours["static_configs"][0]["targets"] == [f"127.0.0.1:{serve['http_options']['port']}"]
