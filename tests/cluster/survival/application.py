"""A real application, ingress and pools under Serve, over engines without a model; and its processes."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from hybridserve.cluster.settings_reading import parse_settings

from . import counting_engine
from .counting_engine import CountingFactory


def deploy(factory: CountingFactory, model: Path, name: str, **args: dict[str, object]) -> None:
    """Run the application `name`, at "/" of a Serve that runs; `args` are its YAML's but for the model.

    The same builders as in production, but for the engine's factory.
    """
    from ray import cloudpickle, serve

    from hybridserve.cluster.ingress.deployment import build_ingress
    from hybridserve.cluster.pool import deployment

    cloudpickle.register_pickle_by_value(counting_engine)
    settings = parse_settings({"model": {"path": str(model), "name": "demo"}, **args})
    built = deployment.CheckpointEngine
    deployment.CheckpointEngine = lambda config: factory
    try:
        pools = {spec.name: deployment.build_pool(settings, spec, "cpu") for spec in settings.pool_specs()}
    finally:
        deployment.CheckpointEngine = built
    serve.run(build_ingress(settings, pools), name=name, route_prefix="/")


@dataclass
class Process:
    pid: int
    title: str

    @property
    def rss_mib(self) -> float:
        """Resident memory; 0 when it has ended."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def cpu_s(self) -> float:
        """Time computed, in user and system mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> float:
        """At once; the `time.monotonic` of it."""
        os.kill(self.pid, signal.SIGKILL)
        return time.monotonic()


def processes(title: str) -> list[Process]:
    """Descendants of this process whose title begins so, as Ray names its workers."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                # it has ended since the folder was listed
                continue
            if state != "Z":
                parents[int(entry.name)], titles[int(entry.name)] = int(parent), text

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid > 1

    return [
        Process(pid, text) for pid, text in sorted(titles.items()) if text.startswith(title) and ours(pid)
    ]


class Application:
    """One that was deployed, from outside."""

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port

    def ingresses(self) -> list[Process]:
        return processes(f"ray::ServeReplica:{self.name}:ingress")

    def replicas(self) -> list[Process]:
        return processes(f"ray::ServeReplica:{self.name}:pool")

    def engines(self) -> list[Process]:
        return processes("ray::EngineActor")

    async def scrape(self) -> list[Sample]:
        """What whoever is asked says of both ingresses."""
        async with httpx.AsyncClient(timeout=10) as client:
            text = (await client.get(f"http://127.0.0.1:{self.port}/metrics")).text
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    async def metrics(self) -> dict[str, float]:
        """Every name's samples, added up."""
        samples: dict[str, float] = {}
        for sample in await self.scrape():
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    async def idle(self) -> bool:
        """No engine has a request, as far as reports have come."""
        try:
            now = await self.metrics()
            if now.get("hybridserve_pool_replicas", 0) < 2:
                # an ingress learns of the replicas with its first request, which this brings about
                async with httpx.AsyncClient(timeout=10) as client:
                    await client.get(f"http://127.0.0.1:{self.port}/ready")
                return False
        except httpx.HTTPError:
            return False
        return now.get("hybridserve_requests_running", 0) + now.get("hybridserve_requests_waiting", 0) == 0

    async def whole(self) -> bool:
        """As many replicas of everything as before, all known, and idle."""
        counts = (len(self.ingresses()), len(self.replicas()), len(self.engines()))
        if counts != (2, 2, 2) or not await self.idle():
            return False
        # the process of an ingress is there before requests go to it
        try:
            samples = await self.scrape()
        except httpx.HTTPError:
            return False
        return len({sample.labels["ingress"] for sample in samples if "ingress" in sample.labels}) == 2


async def seconds_until(condition: Callable[[], object], what: str, limit_s: float = 60.0) -> float:
    """Until the condition, a coroutine function or a plain one, holds."""
    began = time.monotonic()
    while True:
        held = condition()
        if await held if asyncio.iscoroutine(held) else held:
            return time.monotonic() - began
        if time.monotonic() > began + limit_s:
            sys.stdout.write(f"waited {limit_s} s in vain: {what}\n")
            raise AssertionError(f"after {limit_s} s still not: {what}")
        await asyncio.sleep(0.1)
