"""The simulated engine takes the real engine's steps, and keeps to its memory."""

import random
from types import SimpleNamespace

import pytest

from hybridserve.cluster.simulation.clock import VirtualClock
from hybridserve.cluster.simulation.engine import News, Sequence, SimulatedEngine
from hybridserve.replicas.arena.arena import Arena
from hybridserve.replicas.arena.layout import plan_arena
from hybridserve.replicas.engine.engine import Engine
from hybridserve.replicas.engine.plan import Sampled, StepResult
from hybridserve.replicas.models.specs import FullAttentionSpec, LinearAttentionSpec, ModelConfig
from hybridserve.replicas.sampling_params import SamplingParams

MIXERS = (LinearAttentionSpec(1, 1, 8, 8, 2), FullAttentionSpec(4, 2, 32, 16, 1e4))
Load = list[tuple[float, int, int]]
"""(arrival, prompt, answer), the first at 0."""


class Executor:
    """Draws a token wherever one is to be drawn, and notes in which step."""

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.drawn: dict[str, list[int]] = {}

    def submit(self, plan):
        sampled = {one.request_id: Sampled(1, True) for one in plan.sequences if one.sample is not None}
        for name in sampled:
            self.drawn.setdefault(name, []).append(plan.step)
        return SimpleNamespace(result=lambda: StepResult(sampled))


def real_steps(load: Load, overlaps: bool, max_num_seqs: int, budget: int) -> dict[str, list[int]]:
    """In which step the real engine draws each token, when each step takes a second."""
    arena = Arena(plan_arena(MIXERS, 4, 16), 4096)
    config = ModelConfig("fake", 50, 8, 8, 1e-6, True, 10**6, "float32", MIXERS, ())
    executor = Executor(overlaps)
    engine = Engine(
        config, arena, executor, max_model_len=10**5, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    waiting = list(enumerate(load))
    call = 0
    while waiting or engine.has_unfinished():
        # where steps overlap, step n is planned when step n - 1 begins
        now = max(0, call - 1) if overlaps else call
        while waiting and waiting[0][1][0] <= now:
            index, (_, prompt, answer) = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            engine.add_request(str(index), [1] * prompt, params)
        engine.step()
        call += 1
    return executor.drawn


def simulated_steps(load: Load, model) -> dict[str, list[int]]:
    clock = VirtualClock()
    drawn: dict[str, list[int]] = {}

    def on_news(news: News) -> None:
        for sequence, tokens in news.grown:
            assert tokens == 1
            drawn.setdefault(sequence.name, []).append(round(clock.now) - 1)

    engine = SimulatedEngine(model, clock, on_news, report_s=1.0)
    for index, (at, prompt, answer) in enumerate(load):
        clock.at(at, engine.submit, Sequence(str(index), prompt, answer))
    clock.run()
    return drawn


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_token_comes_in_the_real_engines_step(overlaps: bool, seed: int, constant_steps) -> None:
    rng = random.Random(seed)
    max_num_seqs, budget = rng.choice([(4, 64), (8, 300), (3, 100), (16, 2048)])
    # the first goes on while the others come, so that steps begin at whole seconds
    load = [(0.0, 10, 400)]
    times = sorted(rng.randrange(0, 200) + 0.5 for _ in range(40))
    load += [(at, rng.choice([1, 30, 64, 200, 700]), rng.choice([1, 2, 10, 60])) for at in times]
    model = constant_steps(1.0, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, overlaps=overlaps)
    assert simulated_steps(load, model) == real_steps(load, overlaps, max_num_seqs, budget)


@pytest.mark.parametrize("overlaps", [False, True])
def test_many_steps_at_once_change_nothing(overlaps: bool, constant_steps) -> None:
    rng = random.Random(5)
    load = sorted((rng.uniform(0, 300), rng.randrange(1, 500), rng.randrange(1, 80)) for _ in range(60))
    model = constant_steps(1.0, max_num_batched_tokens=256, overlaps=overlaps)

    def ends(report_s: float) -> tuple[dict[str, float], int]:
        clock = VirtualClock()
        found: dict[str, float] = {}
        engine = SimulatedEngine(
            model,
            clock,
            lambda news: found.update({one.name: round(clock.now, 6) for one in news.ended}),
            report_s,
        )
        for index, (at, prompt, answer) in enumerate(load):
            clock.at(at, engine.submit, Sequence(str(index), prompt, answer))
        clock.run()
        return found, clock.num_events

    (each, events), (many, fewer) = ends(1.0), ends(50.0)
    assert each == many and len(each) == 60
    assert fewer < events


def test_a_full_arena_preempts_the_youngest_and_loses_no_token(constant_steps) -> None:
    model = constant_steps(1.0, arena_tokens=1000, unit_tokens=50, max_num_seqs=4)
    clock = VirtualClock()
    tokens: dict[str, int] = {}
    ended: list[str] = []

    def on_news(news: News) -> None:
        assert engine.used_tokens <= 1000
        for sequence, count in news.grown:
            tokens[sequence.name] = tokens.get(sequence.name, 0) + count
        ended.extend(one.name for one in news.ended)

    engine = SimulatedEngine(model, clock, on_news, report_s=10.0)
    for index in range(4):
        clock.at(0.1 * index, engine.submit, Sequence(str(index), 100, 300))
    clock.run()
    assert engine.num_preemptions > 0
    assert tokens == {str(index): 300 for index in range(4)}
    assert sorted(ended) == ["0", "1", "2", "3"] and ended[0] == "0"
    assert engine.used_tokens == 0 and engine.running == 0 and engine.remaining_tokens() == 0


def test_what_never_fits_is_refused(constant_steps) -> None:
    engine = SimulatedEngine(constant_steps(arena_tokens=1000), VirtualClock(), lambda news: None, 1.0)
    with pytest.raises(ValueError, match="900 and 200 tokens needs an arena of 1100 tokens"):
        engine.submit(Sequence("a", 900, 200))
    with pytest.raises(ValueError, match="max_num_seqs must be at most max_num_batched_tokens"):
        constant_steps(max_num_seqs=9, max_num_batched_tokens=8)
