"""What a killed shard, engine, replica or node costs: two replicas of several shards, on fake GPUs.

Logical nodes with logical GPUs on this machine, shards on its CPU with gloo, the demo model. For each fault
one line of JSON: requests that failed and how soon they were told, requests that the other replica served
meanwhile, seconds until both replicas serve again, and what was left behind.

    python tests/benchmarks/survival/kill_shard.py [--spares] [--tp 2] [--faults shard,engine,replica,stop]

With --spares each node has spare processes (`serving.spare_processes`); they are waited for before a fault.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

from hybridserve.cluster.bus.listener import BusListener  # noqa: E402
from hybridserve.cluster.pool.client import HandlePoolClient  # noqa: E402
from hybridserve.cluster.pool.engine_factory import CheckpointEngine  # noqa: E402
from hybridserve.cluster.pool.interface import GenerationRequest, PoolError  # noqa: E402
from hybridserve.cluster.pool.replica import PoolReplica  # noqa: E402
from hybridserve.cluster.pool.replica_actors import EngineActorOptions  # noqa: E402
from hybridserve.cluster.serve_alpha.placement import REPLICA_CPUS, plan_placement  # noqa: E402
from hybridserve.cluster.serve_alpha.proxy_mode import environment  # noqa: E402
from hybridserve.cluster.serve_alpha.spare_workers import SpareWorkersOptions  # noqa: E402
from hybridserve.replicas.engine.config import EngineConfig  # noqa: E402
from hybridserve.replicas.sampling_params import SamplingParams  # noqa: E402
from tests.cluster.survival.application import processes  # noqa: E402

DEMO_MODEL = ROOT / "configs" / "demo-model"
NODES = 3
PROMPTS = [tuple(range(3 + 11 * index, 40 + 13 * index)) for index in range(4)]
ANSWER_TOKENS = 24
HELD_TOKENS = 600
LIMIT_S = 90.0


def describe_process() -> dict[str, object]:
    """Of the process that it is called in."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except OSError:
            continue
    return {
        "pid": os.getpid(),
        "node": ray.get_runtime_context().get_node_id(),
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "shares_memory": any("hybridserve-step-channel" in link for link in links),
    }


class TalkativeReplica(PoolReplica):
    """Says where its processes are."""

    async def whereabouts(self) -> dict[str, Any]:
        actors = (self._actors.engine, *self._actors.shards)
        ranks = [await actor.__ray_call__.remote(lambda self: describe_process()) for actor in actors]
        return {"replica": describe_process(), "ranks": ranks}


class Pool:
    """Two replicas, and who asks them."""

    def __init__(self, tp_size: int, spares: bool) -> None:
        placement = plan_placement(tp_size, "cuda")
        config = EngineConfig(
            str(DEMO_MODEL),
            device="cpu",
            tensor_parallel_size=tp_size,
            cache_memory_bytes=64 * 2**20,
            num_threads=1,
        )
        options = EngineActorOptions(
            max_concurrent_requests=100,
            startup_timeout_s=LIMIT_S,
            num_cpus=placement.engine_cpus,
            num_gpus=placement.shard_gpus,
            num_shards=tp_size,
            shard_cpus=placement.shard_cpus,
            spares=SpareWorkersOptions(1 + tp_size, placement.cpus, placement.gpus) if spares else None,
        )
        deployment = serve.deployment(
            TalkativeReplica,
            name="pool",
            num_replicas=2,
            ray_actor_options={"num_cpus": REPLICA_CPUS},
            max_ongoing_requests=100,
            health_check_period_s=1.0,
            graceful_shutdown_timeout_s=5.0,
            **placement.options,
        )
        self.handle = serve.run(
            deployment.bind(CheckpointEngine(config), options), name="pool", route_prefix=None
        )

    async def open(self) -> None:
        self._listener = BusListener("127.0.0.1")
        await self._listener.start()
        self.client = HandlePoolClient(self.handle, self._listener, "bus")

    async def close(self) -> None:
        await self._listener.close()

    async def replicas(self, but: set[int], limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
        """Where two replicas are that answer and whose processes are not among `but`."""
        found: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + limit_s
        while len(found) < 2:
            assert time.monotonic() < deadline, f"the pool was not whole after {limit_s} s: {found}"
            calls = [self.handle.whereabouts.remote() for _ in range(4)]
            for answer in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(answer, dict) and answer["replica"]["pid"] not in but:
                    found[answer["replica"]["pid"]] = answer
            await asyncio.sleep(0.1)
        return list(found.values())

    async def answer(
        self, prompt: tuple[int, ...], max_tokens: int, begun: asyncio.Event | None = None
    ) -> list[int]:
        """begun: set with the first token."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        tokens: list[int] = []
        async for output in self.client.generate(GenerationRequest("r", prompt, params)):
            tokens += output.token_ids
            if begun is not None:
                begun.set()
        return tokens


async def try_fault(pool: Pool, fault: str, cluster: Cluster, expected: list[list[int]]) -> dict[str, Any]:
    """Do it to one of two replicas that hold long requests, and see what comes of it."""
    victim, other = await pool.replicas(set())
    pids = [victim["replica"]["pid"], *(rank["pid"] for rank in victim["ranks"])]
    began = time.monotonic()
    ends: list[tuple[float, str]] = []

    async def hold(begun: asyncio.Event) -> None:
        error = ""
        try:
            await pool.answer(PROMPTS[0], HELD_TOKENS, begun)
        except PoolError as caught:
            error = str(caught)
        ends.append((time.monotonic() - began, error))

    held = []
    for _ in range(8):
        begun = asyncio.Event()
        held.append(asyncio.create_task(hold(begun)))
        # Serve learns of a replica's load by its answers: sent at once, all could go to the same
        await asyncio.wait_for(begun.wait(), LIMIT_S)
    began = time.monotonic()
    do(fault, victim, cluster)

    async def wait_until_whole() -> tuple[list[dict[str, Any]], float]:
        found = await pool.replicas({pids[0]})
        return found, time.monotonic() - began

    whole = asyncio.create_task(wait_until_whole())
    served, failed = 0, []
    while not whole.done():
        for index, prompt in enumerate(PROMPTS):
            try:
                assert await pool.answer(prompt, ANSWER_TOKENS) == expected[index]
                served += 1
            except PoolError as error:
                failed.append((round(time.monotonic() - began, 2), str(error)))
            # or the asking would take the cores that what starts needs
            await asyncio.sleep(0.1)
    replicas, whole_s = await whole
    # what the other replica still works at has outlived the fault
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    told = [(round(seconds, 2), error) for seconds, error in ends if error]
    assert other["replica"]["pid"] in [replica["replica"]["pid"] for replica in replicas]
    return {
        "fault": fault,
        "held": len(held),
        "held_failed": len(told),
        "told_after_s": max((seconds for seconds, _ in told), default=None),
        "errors": sorted({error for _, error in told}),
        "served_meanwhile": served,
        "failed_meanwhile": failed,
        "whole_after_s": round(whole_s, 1),
        "gpus": [[rank["gpus"] for rank in replica["ranks"]] for replica in replicas],
        "left_behind": await until_gone(pids),
    }


def do(fault: str, victim: dict[str, Any], cluster: Cluster) -> None:
    engine, shard = victim["ranks"][0]["pid"], victim["ranks"][-1]["pid"]
    if fault == "node":
        [socket] = [
            one["RayletSocketName"] for one in ray.nodes() if one["NodeID"] == victim["replica"]["node"]
        ]
        [node] = [one for one in cluster.worker_nodes if one.raylet_socket_name == socket]
        cluster.remove_node(node, allow_graceful=False)
        return
    pid, number = {
        "shard": (shard, signal.SIGKILL),
        "engine": (engine, signal.SIGKILL),
        "replica": (victim["replica"]["pid"], signal.SIGKILL),
        "stop": (engine, signal.SIGSTOP),
    }[fault]
    os.kill(pid, number)


async def until_gone(pids: list[int], limit_s: float = 15.0) -> list[int]:
    """Those of the processes that are still there after so long."""
    deadline = time.monotonic() + limit_s
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def offline_answers() -> list[list[int]]:
    """Of one rank, in this process."""
    from hybridserve.replicas.llm import LLM

    llm = LLM(
        str(DEMO_MODEL), device="cpu", cache_memory_bytes=64 * 2**20, num_threads=1, show_progress=False
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    outputs = llm.generate([list(prompt) for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


async def until_spare(count: int) -> float:
    """Wait for so many processes without work that have loaded what they are to load; how long that took."""
    began = time.monotonic()
    while True:
        before = {one.pid: cpu_seconds(one.pid) for one in processes("ray::IDLE")}
        await asyncio.sleep(1.0)
        idle = [pid for pid, seconds in before.items() if cpu_seconds(pid) < seconds + 0.1]
        if len(idle) >= count:
            return time.monotonic() - began
        assert time.monotonic() < began + 2 * LIMIT_S, f"{len(idle)} of {count} spare processes"


def cpu_seconds(pid: int) -> float:
    """Of a process; endless when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(pool: Pool, cluster: Cluster, faults: list[str], spares: int) -> None:
    """spares: of each node."""
    await pool.open()
    expected = offline_answers()
    say({"start": await pool.replicas(set())})
    answers = await asyncio.gather(*(pool.answer(prompt, ANSWER_TOKENS) for prompt in PROMPTS * 2))
    say({"equal_to_one_rank": answers == expected * 2})
    for fault in faults:
        if spares:
            say({"spares_after_s": round(await until_spare(spares * len(cluster.worker_nodes)), 1)})
        say(await try_fault(pool, fault, cluster, expected))
    await pool.close()


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--faults", default="shard,engine,replica,stop,node")
    parser.add_argument("--spares", action="store_true", help="keep spare processes")
    options = parser.parse_args()
    if options.spares:
        # as `hybridserve serve` sets it for the cluster that it starts
        os.environ.update(environment("serve", Path(), LIMIT_S, 256))
    memory = {"object_store_memory": 100 * 2**20}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False, **memory}
    )
    for _ in range(NODES):
        cluster.add_node(num_cpus=8, num_gpus=options.tp, wait=False, **memory)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    serve.start(proxy_location="Disabled")
    try:
        pool = Pool(options.tp, options.spares)
        spares = 1 + options.tp if options.spares else 0
        asyncio.run(measure(pool, cluster, options.faults.split(","), spares))
        serve.shutdown()
    finally:
        ray.shutdown()
        cluster.shutdown()
    say({"left_in_shm": [name for name in os.listdir("/dev/shm") if "hybridserve" in name]})


if __name__ == "__main__":
    main()
