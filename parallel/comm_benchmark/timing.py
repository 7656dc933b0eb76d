"""Times of replays, on the host's clock for a CPU and on the device's for a GPU, and which rank was slowest.

Before each replay the ranks meet, so that a replay's time holds no waiting for a rank that is still busy with
the one before; what is left of their skew is part of the time, as it is in a model. A collective's graph
holds several calls, one after another as in a model: skew and the graph's launch are then not all of it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from hybridserve.parallel.comm_benchmark.formulas import percentile
from hybridserve.parallel.group import TensorParallelGroup

Step = Callable[[], object]
# before a replay, beside what the host takes to enqueue it: an eager call of NCCL alone takes 100, and what
# it lacks would be measured as the other rank's waiting
_HEAD_START_US = 300
_CYCLES_PER_US = 2000
_BATCH = 100


@dataclass(frozen=True)
class Times:
    """Of the slowest rank of each replay."""

    replays: int
    p50_us: float
    p90_us: float
    p99_us: float

    def as_json(self) -> dict[str, float]:
        return asdict(self)


class Meeting:
    """Where the ranks wait for each other: a sum of one number, on a GPU in its stream."""

    def __init__(self, group: TensorParallelGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self._token = torch.zeros(1, device=device)

    def meet(self) -> None:
        self.group.all_reduce(self._token)

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Per replay, the largest of all ranks' times; the same list on every rank."""
        own = torch.tensor([list(seconds)], dtype=torch.float64, device=self.device)
        return self.group.all_gather(own, 0).amax(0).tolist()


def measure(
    steps: Sequence[Step],
    meeting: Meeting,
    *,
    row_seconds: float,
    min_replays: int,
    max_replays: int,
    calls: int = 1,
) -> tuple[Times, ...]:
    """Times of each of `steps`, one replay of each in turn, so that a drifting machine drifts for all.

    The number of replays is what fits into `row_seconds` for all steps together, within the two limits. What
    a replay takes beside its step, to be launched and to meet, counts as well. A step is `calls` calls; the
    times are of one.
    """
    # the first may compile, or connect
    _replay(steps, meeting, 1)
    began = time.perf_counter()
    warm_up = _replay(steps, meeting, min(3, min_replays))
    own_seconds = (time.perf_counter() - began) / len(warm_up[0])
    [once] = meeting.slowest([own_seconds])
    count = max(min_replays, min(max_replays, int(row_seconds / max(once, 1e-9))))
    return tuple(_summary(meeting.slowest(own), calls) for own in _replay(steps, meeting, count))


def _summary(seconds: Sequence[float], calls: int) -> Times:
    p50, p90, p99 = (round(percentile(seconds, percent) / calls * 1e6, 3) for percent in (50, 90, 99))
    return Times(len(seconds), p50, p90, p99)


def _replay(steps: Sequence[Step], meeting: Meeting, count: int) -> list[list[float]]:
    """This rank's seconds, a list a step."""
    replay = _replay_on_gpu if meeting.device.type == "cuda" else _replay_on_cpu
    return replay(steps, meeting, count)


def _replay_on_cpu(steps: Sequence[Step], meeting: Meeting, count: int) -> list[list[float]]:
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(count):
        for own, step in zip(seconds, steps, strict=True):
            meeting.meet()
            began = time.perf_counter()
            step()
            own.append(time.perf_counter() - began)
    return seconds


def _head_starts(steps: Sequence[Step], meeting: Meeting) -> list[int]:
    """Cycles for each step in which the slowest rank's host enqueues the meeting and a replay, and half as
    much again."""
    own = []
    for step in steps:
        # the first may compile, or connect
        step()
        torch.cuda.synchronize(meeting.device)
        began = time.perf_counter()
        step()
        own.append(time.perf_counter() - began)
    torch.cuda.synchronize(meeting.device)
    return [int((s * 1.5e6 + _HEAD_START_US) * _CYCLES_PER_US) for s in meeting.slowest(own)]


def _replay_on_gpu(steps: Sequence[Step], meeting: Meeting, count: int) -> list[list[float]]:
    head_starts = _head_starts(steps, meeting)
    seconds: list[list[float]] = [[] for _ in steps]
    for first in range(0, count, _BATCH):
        marks = []
        for _ in range(min(_BATCH, count - first)):
            for own, step, head_start in zip(seconds, steps, head_starts, strict=True):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(head_start)
                meeting.meet()
                begin.record()
                step()
                end.record()
                marks.append((own, begin, end))
        torch.cuda.synchronize(meeting.device)
        for own, begin, end in marks:
            own.append(begin.elapsed_time(end) / 1e3)
    return seconds


def capture(step: Step, calls: int = 1) -> Step:
    """`calls` times `step` as one CUDA graph's replay. Other threads may go on using the device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread queries events meanwhile, which a capture for all threads would not survive
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            step()
    return graph.replay
