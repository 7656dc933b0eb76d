"""What a killed ingress replica costs the requests that it holds, by how far they have come.

    python tests/benchmarks/survival/kill_ingress.py configs/demo.yaml --proxy haproxy [--each 12]

A server is started from the configuration, with two ingress replicas behind the proxy that is named, and a
batch of twice `--each`. Then there are that many of each kind: `begun` streams, `whole` answers of the same
length, and streams that are `waiting` for a place in the batch. One ingress replica gets SIGKILL. Printed is
a line of JSON: by kind, how many failed and how these ended; `held` by the killed one in all; the longest
silence of a stream that ended well; `told_after_s`, until the last failure was told; `whole_after_s`, until
there were two ingress replicas again.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "benchmarks")]

from serve.servers import started  # noqa: E402

from hybridserve.cluster.serve_file import read_application  # noqa: E402
from tests.cluster.survival.application import processes, seconds_until  # noqa: E402
from tests.cluster.survival.client import Exchange, Reply  # noqa: E402

TITLE = "ray::ServeReplica:hybridserve:ingress"
TOKENS = 400
LIMIT_S = 240.0


def changed(config: Path, proxy: str, each: int, folder: Path) -> Path:
    """The configuration with two ingress replicas and room for a third of the requests to wait."""
    content, application = read_application(config)
    args = application["args"]
    args["ingress"] = {**args.get("ingress", {}), "proxy": proxy, "num_replicas": 2}
    # each ingress replica takes its half, and a proxy may send more to one of them
    bounds = {"max_batch_size": 2 * each, "max_concurrent_requests": 12 * each, "num_threads": 1}
    args["serving"] = {**args.get("serving", {}), **bounds, "queue_deadline_s": LIMIT_S}
    path = folder / config.name
    path.write_text(yaml.safe_dump(content))
    return path


def body(kind: str, number: int) -> dict[str, object]:
    return {
        "prompt": [number + 5, 6, 7],
        "max_tokens": TOKENS,
        "stream": kind != "whole",
        "ignore_eos": True,
        "temperature": 0,
    }


async def samples(url: str, name: str, label: str) -> dict[str, float]:
    """A metric's values by a label, added up over the others."""
    async with httpx.AsyncClient(timeout=30) as client:
        text = (await client.get(f"{url}/metrics")).text
    found: dict[str, float] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += sample.value
    return found


def how(reply: Reply) -> str:
    """How an answer that failed ended."""
    if reply.broken:
        return f"{reply.status or 'no status'}, broken off: {reply.broken}"
    told = reply.error or {}
    return (
        f"{reply.status}, {'event' if reply.events else 'response'} {told.get('code', told.get('message'))}"
    )


async def measure(url: str, port: int, each: int) -> dict[str, object]:
    kinds = {
        kind: [Exchange("127.0.0.1", port, "/v1/completions", body(kind, i)) for i in range(each)]
        for kind in ("begun", "whole", "waiting")
    }
    tasks: list[asyncio.Task[Reply]] = []

    async def running() -> int:
        return int((await samples(url, "hybridserve_requests_running", "pool"))["pool"])

    async def waiting() -> int:
        return int((await samples(url, "hybridserve_requests_waiting", "pool"))["pool"])

    async def all_held() -> bool:
        return await running() == 2 * each and await waiting() == each

    async def all_running() -> bool:
        begun = all(one.reply.events for one in kinds["begun"])
        return begun and await running() == 2 * each

    tasks += [asyncio.create_task(one.run()) for kind in ("begun", "whole") for one in kinds[kind]]
    await seconds_until(all_running, "streams and whole answers run")
    tasks += [asyncio.create_task(one.run()) for one in kinds["waiting"]]
    await seconds_until(all_held, "the others wait")
    held = await samples(url, "hybridserve_ingress_requests_in_flight", "ingress")
    before = processes(TITLE)
    killed_at = before[0].kill()

    def whole_again() -> bool:
        now = [one.pid for one in processes(TITLE)]
        return len(now) == 2 and before[0].pid not in now

    recovering = asyncio.create_task(seconds_until(whole_again, "two ingress replicas", LIMIT_S))
    await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)
    whole_after_s = await recovering
    left = await samples(url, "hybridserve_ingress_requests_in_flight", "ingress")
    replies = {kind: [one.reply for one in ones] for kind, ones in kinds.items()}
    failed = [one for ones in replies.values() for one in ones if not one.complete]
    good = [one for ones in replies.values() for one in ones if one.complete and one.events]
    return {
        "each": each,
        "held": sum(count for name, count in held.items() if name not in left),
        "failed": {kind: sum(not one.complete for one in ones) for kind, ones in replies.items()},
        "ended": Counter(how(one) for one in failed),
        "longest_silence_s": max((one.longest_silence_s for one in good), default=None),
        "told_after_s": max((one.ended - killed_at for one in failed), default=None),
        "whole_after_s": whole_after_s,
        "seconds": time.monotonic() - killed_at,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--proxy", choices=("serve", "haproxy"), default="serve")
    parser.add_argument("--each", type=int, default=12)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = changed(args.config, args.proxy, args.each, Path(folder))
        with started(config) as file:
            port = int(file.url.rpartition(":")[2])
            print(json.dumps(asyncio.run(measure(file.url, port, args.each))))


if __name__ == "__main__":
    main()
