"""The step thread: takes requests and cancels between steps, sleeps when idle, survives bad requests."""

import queue
import time
from collections.abc import Callable, Iterator

import pytest

from hybridserve.cluster.pool.engine_loop import BuiltEngine, EngineFactory, EngineLoop
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.replicas.engine.plan import EngineLoad, EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams


class Recorder:
    """Keeps the events in a queue."""

    def __init__(self) -> None:
        self.events: queue.Queue[tuple[object, ...]] = queue.Queue()

    def started(self, info: EngineInfo) -> None:
        self.events.put(("started", info))

    def stepped(self, outputs: list[EngineOutput], load: EngineLoad) -> None:
        self.events.put(("stepped", outputs, load))

    def refused(self, request_id: str, message: str) -> None:
        self.events.put(("refused", request_id, message))

    def failed(self, request_id: str, message: str) -> None:
        self.events.put(("failed", request_id, message))

    def died(self, message: str) -> None:
        self.events.put(("died", message))

    def next(self, kind: str) -> tuple[object, ...]:
        """The next event of that kind, others skipped."""
        while True:
            event = self.events.get(timeout=5)
            if event[0] == kind:
                return event


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def run(recorder: Recorder) -> Iterator[Callable[[EngineFactory], EngineLoop]]:
    loops = []

    def start(factory: EngineFactory) -> EngineLoop:
        loops.append(EngineLoop(factory, recorder))
        loops[-1].start()
        return loops[-1]

    yield start
    for loop in loops:
        loop.close()


def request(request_id: str, prompt: tuple[int, ...], max_tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


def test_serves_requests_that_join_late(run, recorder, fake_factory) -> None:
    loop = run(fake_factory(step_s=0.001))
    _, info = recorder.next("started")
    assert (info.model_type, info.vocab_size, info.device, info.dtype) == ("fake", 1000, "cpu", "float32")
    loop.submit(request("a", (1, 2), max_tokens=50))
    _, [first], _ = recorder.next("stepped")
    loop.submit(request("b", (10,)))
    tokens: dict[str, list[int]] = {"a": list(first.token_ids), "b": []}
    finished = set()
    while finished != {"a", "b"}:
        _, outputs, _ = recorder.next("stepped")
        for output in outputs:
            tokens[output.request_id].extend(output.token_ids)
            if output.finished:
                finished.add(output.request_id)
    assert tokens == {"a": list(range(3, 53)), "b": list(range(10, 14))}


def test_refusals_and_bugs_end_one_request_only(run, recorder) -> None:
    class Picky:
        model_config = type("Config", (), {"model_type": "picky", "vocab_size": 4})
        max_model_len = max_num_seqs = 4

        def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
            if request_id == "bad":
                raise ValueError("prompt: too long")
            raise KeyError("a bug")

        def abort(self, request_id: str) -> None:
            raise AssertionError("nothing to abort")

        def has_unfinished(self) -> bool:
            return False

        def check(self) -> None:
            pass

        def step(self) -> list[EngineOutput]:
            raise AssertionError("nothing to step")

        def load(self) -> EngineLoad:
            return EngineLoad(*[0] * 11)

    loop = run(lambda: BuiltEngine(Picky(), "cpu", "float32"))
    loop.submit(request("bad", (1,)))
    loop.submit(request("worse", (1,)))
    assert recorder.next("refused") == ("refused", "bad", "prompt: too long")
    assert recorder.next("failed") == ("failed", "worse", "KeyError: 'a bug'")


def test_an_abort_frees_before_the_next_step(run, recorder, fake_factory) -> None:
    loop = run(fake_factory(step_s=0.02))
    loop.submit(request("a", (1,), max_tokens=200))
    recorder.next("stepped")
    loop.abort("a")
    steps = [recorder.next("stepped") for _ in range(2)]
    assert steps[-1][1] == []
    assert steps[-1][2].running == 0


def test_an_idle_loop_does_not_spin(run, recorder, fake_factory) -> None:
    loop = run(fake_factory())
    recorder.next("started")
    loop.submit(request("a", (1,), max_tokens=1))
    recorder.next("stepped")
    time.sleep(0.3)
    assert recorder.events.empty()


def test_death_in_a_step_and_in_the_factory(run, recorder, fake_factory) -> None:
    loop = run(fake_factory())
    loop.submit(request("a", (666,)))
    assert recorder.next("died") == ("died", "RuntimeError: the fake engine was told to die")
    run(fake_factory(error="model.path: nothing there"))
    assert recorder.next("died") == ("died", "ValueError: model.path: nothing there")


def test_death_while_there_is_nothing_to_do(run, recorder, fake_factory, monkeypatch) -> None:
    """A shard elsewhere may die at any time, and the next request should not have to find out."""
    monkeypatch.setattr("hybridserve.cluster.pool.engine_loop.CHECK_S", 0.02)
    built = fake_factory()()
    run(lambda: built)
    recorder.next("started")
    time.sleep(0.1)
    assert recorder.events.qsize() <= 1
    built.engine.dead = "rank 1 of 2 was killed by SIGKILL"
    assert recorder.next("died") == ("died", "RuntimeError: rank 1 of 2 was killed by SIGKILL")
