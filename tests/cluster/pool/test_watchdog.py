"""An engine that stops stepping, and one whose golden prompt goes wrong: what their actor says of them."""

import asyncio
import threading
from dataclasses import dataclass, replace

import pytest

from hybridserve.cluster.bus.frames import KEY_BYTES, ReplyTo
from hybridserve.cluster.pool.engine_actor import EngineActor
from hybridserve.cluster.pool.engine_loop import BuiltEngine
from hybridserve.cluster.pool.golden import golden_fault, golden_request
from hybridserve.cluster.pool.interface import EngineInfo, GenerationRequest
from hybridserve.cluster.pool.record import GenerationReply
from hybridserve.cluster.pool.watchdog import StepWatchdog
from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.sampling_params import SamplingParams

INFO = EngineInfo("fake", 100, 256, 4, "float32", "cpu")


@dataclass
class Hanging:
    """Builds a fake engine whose step waits, once it is told to."""

    built: BuiltEngine
    hang: threading.Event
    release: threading.Event

    def __call__(self) -> BuiltEngine:
        step = self.built.engine.step

        def hanging() -> list[EngineOutput]:
            if self.hang.is_set():
                self.release.wait(30)
            return step()

        self.built.engine.step = hanging
        return self.built


@pytest.mark.anyio
async def test_an_engine_that_stops_stepping_is_dead(fake_factory) -> None:
    factory = Hanging(fake_factory()(), threading.Event(), threading.Event())
    actor = EngineActor(factory, stuck_after_s=0.5)
    assert isinstance(await actor.start(), EngineInfo)
    # idle, it is no more stuck than busy
    await asyncio.sleep(0.8)
    factory.hang.set()
    params = SamplingParams(max_tokens=50)
    reply_to = ReplyTo("127.0.0.1", 1, b"k" * KEY_BYTES)
    held = asyncio.create_task(actor.generate(GenerationRequest("r", (5,), params), reply_to))
    reason = "the engine has made no step for 0.5 s (serving.stuck_after_s)"
    assert await asyncio.wait_for(actor.wait_for_death(), 20) == reason
    assert (await held).failed == reason
    # what the step that was given up brings in the end changes nothing
    factory.release.set()
    await actor.close()
    assert await actor.wait_for_death() == reason


def test_only_one_turn_that_lasts_is_stuck() -> None:
    watchdog = StepWatchdog(10.0)
    assert watchdog.tick_s == 0.5
    assert not any(watchdog.is_stuck(turn) for turn in range(100))
    assert not any(watchdog.is_stuck(None) for _ in range(100))
    # the first look only says which turn it is
    assert [watchdog.is_stuck(7) for _ in range(21)] == [False] * 20 + [True]


def test_the_golden_prompt_takes_a_step_of_each_kind() -> None:
    request = golden_request(INFO)
    assert len(request.prompt_token_ids) == 8 and request.params.max_tokens == 2
    assert all(token < INFO.vocab_size for token in request.prompt_token_ids)
    tiny = golden_request(replace(INFO, vocab_size=3, max_model_len=4))
    assert len(tiny.prompt_token_ids) == 2 and max(tiny.prompt_token_ids) < 3


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (GenerationReply(output=EngineOutput("g", 0, (5, 6), finish_reason="length")), None),
        (GenerationReply(output=EngineOutput("g", 0, (5,), finish_reason="length")), "1 tokens instead of 2"),
        (GenerationReply(output=EngineOutput("g", 0, (5, 100))), "the vocabulary has 100"),
        (GenerationReply(output=EngineOutput("g", 0, error="the model gave NaN")), "the model gave NaN"),
        (GenerationReply(failed="the engine died"), "the engine died"),
        (GenerationReply(refused="too long"), "too long"),
    ],
)
def test_what_is_wrong_with_an_answer(reply: GenerationReply, fault: str | None) -> None:
    found = golden_fault(INFO, reply)
    assert found is None if fault is None else fault in found


@pytest.mark.anyio
async def test_an_engine_that_fails_the_golden_prompt_does_not_start(fake_factory) -> None:
    factory = Hanging(fake_factory()(), threading.Event(), threading.Event())
    engine = factory.built.engine

    def step() -> list[EngineOutput]:
        names = list(engine.running)
        engine.running.clear()
        return [EngineOutput(name, 0, error="the model gave NaN", finish_reason="error") for name in names]

    engine.step = step
    actor = EngineActor(factory)
    assert await actor.start() == "the golden prompt failed: the model gave NaN"
    await actor.close()
