"""Spare processes: who has them, what they load, and that Ray gives them to new actors."""

import asyncio
import io
import os
import subprocess
import sys
import time

import grpc
import pytest

from hybridserve.cluster.pool import spare
from hybridserve.cluster.serve_alpha import spare_workers
from hybridserve.cluster.serve_alpha.spare_workers import (
    SpareWorkers,
    SpareWorkersOptions,
    raylets,
    spare_processes,
)

# a process that looked for a GPU when it loads would hold on to what it saw then, or take memory of each
_LOAD = """
import sys
import torch
import triton

def refuse(*_):
    raise AssertionError("CUDA was looked for while importing")

torch.cuda._lazy_init = refuse
torch._C._cuda_getDeviceCount = refuse
type(triton.runtime.driver).active = property(refuse)
before = set(sys.modules)

import hybridserve.cluster.serve_alpha.preloaded
import gc
assert gc.isenabled()
print(*sorted(set(sys.modules) - before))
"""


def loaded(code: str, job: str) -> set[str]:
    """The modules that a worker of that job has after `code`, which prints them."""
    env = {**os.environ, "RAY_JOB_ID": job}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "could not load" not in run.stderr, run.stderr
    return set(run.stdout.split())


def test_a_spare_process_loads_what_a_replica_needs_and_looks_for_no_gpu() -> None:
    modules = loaded(_LOAD, "ffffffff")
    assert "hybridserve.replicas.engine.rank" in modules
    assert "hybridserve.cluster.pool.engine_actor" in modules
    assert "ray.serve._private.replica" in modules


def test_a_process_that_was_started_for_somebody_loads_nothing() -> None:
    code = "import sys, hybridserve.cluster.serve_alpha.preloaded; print(*sys.modules)"
    modules = loaded(code, "01000000")
    assert "hybridserve.cluster.serve_alpha.preloaded" in modules
    assert not modules & {"torch", "ray", "hybridserve.cluster.pool.spare"}


def test_what_cannot_be_loaded_is_said_and_the_rest_is_loaded(monkeypatch, caplog) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delitem(sys.modules, "this", raising=False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    spare.load(["hybridserve.no_such_room", "this"])
    assert "this" in sys.modules
    assert "could not load hybridserve.no_such_room" in caplog.text


def node(name: str, alive: bool = True, **resources: float) -> dict[str, object]:
    return {
        "NodeID": name,
        "Alive": alive,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerPort": 7,
        "Resources": resources,
    }


def test_only_nodes_that_could_hold_a_replica_have_them() -> None:
    nodes = [
        node("head", CPU=64.0),
        node("fits", CPU=8.0, GPU=2.0),
        node("small", CPU=8.0, GPU=1.0),
        node("gone", alive=False, CPU=8.0, GPU=2.0),
    ]
    [found] = raylets(nodes, SpareWorkersOptions(3, cpus=3.1, gpus=2.0))
    assert (found.node_id, found.address) == ("fits", "10.0.0.1:7")


@pytest.mark.usefixtures("ray_instance")
def test_what_is_missing_is_started_and_given_to_the_next_actor() -> None:
    import ray

    [here] = raylets(ray.nodes(), SpareWorkersOptions(0, cpus=0.0, gpus=0.0))
    there = set(spare_processes(here.address))
    wanted = len(there) + 1
    SpareWorkers(SpareWorkersOptions(wanted, cpus=0.1, gpus=0.0)).fill()
    deadline = time.monotonic() + 60
    while len(found := set(spare_processes(here.address))) < wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)

    class Actor:
        def pid(self) -> int:
            return os.getpid()

    actor = ray.remote(num_cpus=0)(Actor).remote()
    pid = ray.get(actor.pid.remote())
    assert pid in found
    assert pid not in spare_processes(here.address)
    ray.kill(actor)


class Unreachable(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = lambda: code


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What raylets are asked for, in the place of real ones: address and number."""
    import ray

    asked: list[tuple[str, int]] = []
    nodes = [{**node(name, CPU=1.0), "NodeManagerAddress": name} for name in "ab"]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(SpareWorkers, "_ask", lambda self, address, count: asked.append((address, count)))
    return asked


def test_a_node_is_asked_again_when_something_has_come_or_after_a_while(asked, monkeypatch) -> None:
    spares, now = SpareWorkers(SpareWorkersOptions(3, cpus=0.1, gpus=0.0)), [100.0]
    there = {"a:7": [1], "b:7": [1, 2, 3]}
    monkeypatch.setattr(spare_workers, "spare_processes", lambda address: there[address])
    monkeypatch.setattr(spare_workers.time, "monotonic", lambda: now[0])
    spares.fill()
    spares.fill()
    assert asked == [("a:7", 2)]
    there["a:7"] = [1, 4]
    spares.fill()
    assert asked == [("a:7", 2), ("a:7", 1)]
    now[0] += 29.0
    spares.fill()
    assert len(asked) == 2
    now[0] += 2.0
    there["b:7"] = []
    spares.fill()
    assert asked[2:] == [("a:7", 1), ("b:7", 3)]


def test_a_node_that_does_not_answer_holds_up_no_other(asked, monkeypatch) -> None:
    def processes(address: str) -> list[int]:
        if address == "a:7":
            raise Unreachable(grpc.StatusCode.UNAVAILABLE)
        return []

    monkeypatch.setattr(spare_workers, "spare_processes", processes)
    SpareWorkers(SpareWorkersOptions(3, cpus=0.1, gpus=0.0)).fill()
    assert asked == [("b:7", 3)]


@pytest.mark.anyio
async def test_only_who_is_in_charge_asks(asked, monkeypatch) -> None:
    turns = iter([False, False, True])

    def in_charge() -> bool:
        assert asked == []
        return next(turns)

    def processes(address: str) -> list[int]:
        raise Unreachable(grpc.StatusCode.UNIMPLEMENTED)

    monkeypatch.setattr(spare_workers, "spare_processes", processes)
    monkeypatch.setattr(spare_workers, "_PERIOD_S", 0.01)
    await asyncio.wait_for(SpareWorkers(SpareWorkersOptions(3, 0.1, 0.0), in_charge).keep(), 30)
    assert list(turns) == []


@pytest.mark.anyio
async def test_a_ray_without_the_calls_is_asked_once(asked, monkeypatch) -> None:
    def processes(address: str) -> list[int]:
        raise Unreachable(grpc.StatusCode.UNIMPLEMENTED)

    monkeypatch.setattr(spare_workers, "spare_processes", processes)
    monkeypatch.setattr(spare_workers, "_PERIOD_S", 0.01)
    await asyncio.wait_for(SpareWorkers(SpareWorkersOptions(3, cpus=0.1, gpus=0.0)).keep(), 30)
    assert asked == []
