"""Ranks that die, hang or never start: who hears of it, how soon, and what is left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hybridserve.parallel.group import TensorParallelGroup
from hybridserve.parallel.step_channel.watch import RankFailure
from hybridserve.replicas.engine import build, local_ranks
from hybridserve.replicas.engine.build import build_engine
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.local_ranks import LocalProcesses
from hybridserve.replicas.engine.placement import check_gpus, resolve_placement
from hybridserve.replicas.engine.sharded_executor import uninterrupted
from hybridserve.replicas.llm import LLM, SamplingParams
from hybridserve.replicas.models.config import load_model_config

LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
PROMPTS = [[5] * 40, [7] * 90]


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """No process, no memory, and this process' number of threads as it was."""
    gc.collect()
    threads, named, files = torch.get_num_threads(), set(os.listdir("/dev/shm")), channel_files()
    yield
    torch.set_num_threads(threads)
    gc.collect()
    assert rank_processes() == []
    assert channel_files() == files
    assert set(os.listdir("/dev/shm")) <= named


@pytest.fixture
def options(demo_model: Path) -> dict[str, object]:
    size = {"tensor_parallel_size": 2, "cache_memory_bytes": 32 * 2**20}
    return {"model": str(demo_model), "device": "cpu", "max_num_batched_tokens": 64, **size}


def seconds_until_failure(llm: LLM, harm: Callable[[], None]) -> tuple[str, float]:
    """What `generate` raises, and how long after `harm`, which is done while steps run."""
    harmed = []

    def later() -> None:
        harm()
        harmed.append(time.monotonic())

    timer = threading.Timer(0.5, later)
    timer.start()
    with pytest.raises(RankFailure) as caught:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    return str(caught.value), time.monotonic() - harmed[0]


def test_a_rank_that_is_killed_ends_all_requests(options) -> None:
    llm = LLM(show_progress=False, **options)
    (rank,) = rank_processes()
    failure, seconds = seconds_until_failure(llm, lambda: os.kill(rank, signal.SIGKILL))
    assert failure == "rank 1 of 2 was killed by SIGKILL"
    assert seconds < 5.0
    assert not llm.engine.has_unfinished()
    assert rank_processes() == []
    with pytest.raises(RankFailure, match="rank 1 of 2 was killed by SIGKILL"):
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    llm.shutdown()


def test_a_rank_that_is_stopped_ends_all_requests(options) -> None:
    """It keeps its connections, so nothing but its silence tells."""
    llm = LLM(show_progress=False, **options)
    (rank,) = rank_processes()
    failure, seconds = seconds_until_failure(llm, lambda: os.kill(rank, signal.SIGSTOP))
    assert failure == "rank 1 of 2 has shown no sign of life for 4 s"
    assert seconds < 8.0
    # the ranks end with the object, too
    del llm


def test_ranks_end_with_a_process_that_is_killed(options) -> None:
    program = (
        "import sys, time; from hybridserve.replicas.llm import LLM\n"
        f"llm = LLM(show_progress=False, **{options!r})\n"
        "sys.stdout.write('ready\\n'); sys.stdout.flush(); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    (rank,) = rank_processes(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_until(lambda: not is_running(rank), 5.0)


def test_a_rank_that_cannot_start_says_why(options, monkeypatch) -> None:
    broken = (
        "from hybridserve.replicas.engine import rank, rank_main\n"
        "def fail(*args, **options): raise ValueError('no room for it')\n"
        "rank.build_shard = fail; rank_main.main()"
    )
    monkeypatch.setattr(local_ranks, "_PROGRAM", broken)
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: ValueError: no room for it"):
        LLM(show_progress=False, **options)


def test_a_rank_that_ends_at_once_is_noticed(options, monkeypatch) -> None:
    monkeypatch.setattr(local_ranks, "_PROGRAM", "raise SystemExit(3)")
    with pytest.raises(RankFailure, match="rank 1 of 2 exited with code 3"):
        LLM(show_progress=False, **options)


def test_an_error_of_rank_0_ends_the_others(options, monkeypatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("rank 0 has no room")

    aborted = []
    monkeypatch.setattr(build, "plan_capacity", fail)
    monkeypatch.setattr(TensorParallelGroup, "abort", lambda group: aborted.append(group.size))
    with pytest.raises(ValueError, match="rank 0 has no room"):
        LLM(show_progress=False, **options)
    # on a GPU what is queued would wait for them
    assert aborted == [2]


@pytest.mark.parametrize(
    ("size", "message"), [(3, "tensor_parallel_size is 3, but tp_size 3 does not divide .*; the nearest")]
)
def test_a_size_that_does_not_divide_starts_nothing(options, size, message) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(**{**options, "tensor_parallel_size": size}))


def test_every_rank_has_the_visible_gpu_of_its_number(options, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = EngineConfig(**{**options, "device": "cuda"})
    model_config = load_model_config(config.model)
    devices = [resolve_placement(config, model_config, rank).device for rank in range(2)]
    assert [str(device) for device in devices] == ["cuda:0", "cuda:1"]
    local = LocalProcesses()
    assert [local.device_index(rank) for rank in range(4)] == [0, 1, 2, 3]
    check_gpus(2, 2, "3,1")
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size is 4, .* 2 CUDA .*\(CUDA_VISIBLE_DEVICES is '3,1'\)"
    ):
        check_gpus(4, 2, "3,1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but torch sees 1 CUDA device"):
        build_engine(config)


def test_an_interrupt_waits_for_the_step() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        steps.append("done")
    assert steps == ["done"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_of_the_terminal_is_rank_0s_to_handle(options) -> None:
    """Ctrl-C goes to the other ranks as well, which may be at a step: they stay for the next one."""
    llm = LLM(show_progress=False, **options)
    (rank,) = rank_processes()
    os.kill(rank, signal.SIGINT)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 3]
    assert rank_processes() == [rank]
    llm.shutdown()


def test_the_end_of_a_fork_ends_no_rank(options, monkeypatch) -> None:
    llm = LLM(show_progress=False, **options)
    ranks = rank_processes()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: 0)
        llm.engine._executor._stop(0.0)
    assert len(ranks) == 1 and rank_processes() == ranks
    llm.shutdown()


def rank_processes(parent: int | None = None) -> list[int]:
    """The ids of running processes of ranks that `parent`, by default this process, has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_running(int(entry.name)):
            status, command = (_text(entry / name) for name in ("stat", "cmdline"))
            if "rank_main" in command and int(status.rpartition(")")[2].split()[1]) == (
                parent or os.getpid()
            ):
                found.append(int(entry.name))
    return found


def is_running(pid: int) -> bool:
    """A process that has ended and that nobody has asked about yet (a zombie) is not."""
    state = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def channel_files() -> int:
    """How many descriptors of step channels this process holds."""
    links = (_link(entry) for entry in Path("/proc/self/fd").iterdir())
    return sum("hybridserve-step-channel" in link for link in links)


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
