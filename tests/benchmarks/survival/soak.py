"""Short requests without end: what a server's processes gain in memory.

Starts Ray, Serve and a real application (two ingresses, two replicas) over engines without a model, sends
requests of a few tokens from some clients at a time, half of them streamed, and prints each process' resident
memory, and its slope over the later half. `python tests/benchmarks/survival/soak.py [--requests N]`
"""

import argparse
import asyncio
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", OMP_NUM_THREADS="1")
# as `hybridserve serve` sets for the Serve that it starts
os.environ.update(
    RAY_worker_niceness="0",
    RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD="0",
    RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP="0",
)
sys.path.insert(0, str(ROOT))

from tests.cluster.survival.application import Application, Process, deploy, processes, seconds_until  # noqa: E402
from tests.cluster.survival.client import Exchange, completion  # noqa: E402
from tests.cluster.survival.counting_engine import CountingFactory  # noqa: E402

SAMPLES = 20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="stop after that many, with fewer")
    return parser.parse_args()


class Soak:
    """The load, and what was seen of the processes."""

    def __init__(self, application: Application, options: argparse.Namespace) -> None:
        self._application = application
        self._options = options
        self._left = options.requests
        self._deadline = time.monotonic() + options.max_seconds
        self.sent = 0
        self.failed: list[str] = []
        self.samples: list[tuple[int, dict[str, float]]] = []

    def parts(self) -> dict[str, Process]:
        application = self._application
        named = {"ingress": application.ingresses(), "replica": application.replicas()}
        named |= {"engine": application.engines(), "proxy": processes("ray::ProxyActor")}
        named |= {"controller": processes("ray::ServeController")}
        return {f"{name} {i}": one for name, ones in named.items() for i, one in enumerate(ones)}

    async def run(self) -> None:
        parts = self.parts()
        clients = [asyncio.create_task(self._client(number)) for number in range(self._options.clients)]
        every = self._options.requests // SAMPLES
        while not all(client.done() for client in clients):
            if self.sent >= len(self.samples) * every:
                self.samples.append((self.sent, {name: one.rss_mib for name, one in parts.items()}))
            await asyncio.sleep(0.1)
        await asyncio.gather(*clients)
        self.samples.append((self.sent, {name: one.rss_mib for name, one in parts.items()}))

    async def _client(self, number: int) -> None:
        while self._left > 0 and time.monotonic() < self._deadline:
            self._left -= 1
            body = completion([random.randrange(1000)], self._options.tokens, stream=number % 2 > 0)
            reply = await Exchange("127.0.0.1", self._application.port, "/v1/completions", body).run()
            self.sent += 1
            if not reply.complete:
                self.failed.append(f"{reply.status} {reply.broken or reply.error}")

    def slopes(self) -> dict[str, float]:
        """MiB per 1,000 requests over the later half, by least squares."""
        late = self.samples[len(self.samples) // 2 :]
        mean_x = sum(x for x, _ in late) / len(late)
        spread = sum((x - mean_x) ** 2 for x, _ in late)
        found = {}
        for name in late[0][1]:
            mean_y = sum(y[name] for _, y in late) / len(late)
            found[name] = 1000 * sum((x - mean_x) * (y[name] - mean_y) for x, y in late) / spread
        return found


def main() -> None:
    import ray
    from ray import serve

    options = parse()
    ray.init(num_cpus=8, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    port = random.SystemRandom().randrange(20000, 32768)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        deploy(
            CountingFactory(step_s=0.005),
            ROOT / "configs" / "demo-model",
            "soak",
            serving={"device": "cpu", "max_concurrent_requests": 2 * options.clients},
            pools=[{"name": "only", "replicas": 2}],
            ingress={"num_replicas": 2},
        )
        application = Application("soak", port)
        soak = Soak(application, options)
        began = time.monotonic()
        asyncio.run(soak.run())
        seconds = time.monotonic() - began
        asyncio.run(seconds_until(application.idle, "nothing runs"))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(f"{soak.sent} requests in {seconds:.0f} s, {len(soak.failed)} failed {soak.failed[:3]}")
    slopes = soak.slopes()
    print("MiB resident at the start, half-way, and at the end; MiB per 1,000 requests over the later half")
    first, middle, last = (soak.samples[at][1] for at in (0, len(soak.samples) // 2, -1))
    for name in first:
        print(f"{name:14} {first[name]:7.1f} {middle[name]:7.1f} {last[name]:7.1f} {slopes[name]:8.3f}")


if __name__ == "__main__":
    main()
