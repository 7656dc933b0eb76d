"""Plans of random engine runs, through bytes and back."""

import random

import pytest

from hybridserve.replicas.arena.arena import Copies
from hybridserve.replicas.engine.plan import SampleSpec, ScheduledSequence, StepPlan
from hybridserve.replicas.engine.plan_codec import REMEMBERED_STEPS, PlanDecoder, PlanEncoder
from hybridserve.replicas.engine.ranks import END
from hybridserve.replicas.sampling_params import SamplingParams


def on_the_wire(plan: StepPlan) -> StepPlan:
    """A copy of the plan with lists of its own; without the token ids that no sampler reads."""

    def sample(spec):
        if spec is None:
            return None
        return spec._replace(token_ids=list(spec.token_ids) if spec.params.has_penalty else [])

    sequences = tuple(
        s._replace(
            token_ids=list(s.token_ids),
            block_table=list(s.block_table),
            sample=sample(s.sample),
            next_token_ids=list(s.next_token_ids) or (),
        )
        for s in plan.sequences
    )
    return StepPlan(plan.step, sequences, plan.num_decodes, plan.copies)


def through(encoder: PlanEncoder, decoder: PlanDecoder, plan: StepPlan) -> int:
    """Assert that the plan arrives; returns its bytes."""
    message = encoder.encode(plan)
    assert on_the_wire(decoder.decode(message)) == on_the_wire(plan)
    return len(message)


def random_params(rng: random.Random) -> SamplingParams:
    ways = (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 10**30, "logprobs": 2},
        {"repetition_penalty": 1.2, "logit_bias": {3: 1.5, 7: -100.0}, "stop": ("é\n",)},
        {"min_tokens": 3, "stop_token_ids": (4, 5), "prompt_logprobs": 1},
        {"presence_penalty": 0.1, "max_tokens": 10**25, "seed": 2**64 - 1},
    )
    how = {"max_tokens": rng.randrange(4, 40), **rng.choice(ways)}
    return SamplingParams(**how)


def watch(executor, encoder: PlanEncoder, decoder: PlanDecoder) -> list[StepPlan]:
    """From now on every plan of the executor's engine goes through bytes; returns the plans, as they come."""
    submit, plans = executor.submit, []

    def watched(plan):
        through(encoder, decoder, plan)
        plans.append(plan)
        return submit(plan)

    executor.submit = watched
    return plans


@pytest.mark.parametrize(
    ("mix", "extents", "preempts"), [("hybrid", 6, False), ("small units", 2, True), ("full only", 1, True)]
)
def test_every_plan_arrives(make_engine, mix, extents, preempts) -> None:
    """Requests come, are cancelled and preempted; names are taken again while others run."""
    engine, executor = make_engine(mix, extents, budget=40, max_num_seqs=6)
    plans = watch(executor, PlanEncoder(), PlanDecoder())
    rng = random.Random(8)
    while len(plans) < 200:
        for _ in range(rng.randrange(3)):
            name = f"r{rng.randrange(12)}"
            if rng.random() < 0.1:
                engine.abort(name)
            if name not in engine._requests:
                prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 90))]
                engine.add_request(name, prompt, random_params(rng))
        if engine.has_unfinished():
            engine.step()
    assert preempts == (engine.load().preemptions > 0)


def test_moved_pages_arrive(make_engine) -> None:
    """Short answers leave page extents half empty, which are packed for newcomers' units."""
    engine, executor = make_engine("small pages", extents=8, budget=2000, max_model_len=3000)
    plans = watch(executor, PlanEncoder(), PlanDecoder())
    for i in range(4):
        params = SamplingParams(temperature=0, max_tokens=60 if i % 2 else 2)
        engine.add_request(f"r{i}", [i] * 400, params)
    while engine.has_unfinished():
        engine.step()
        if len(plans) == 4:
            for i in range(4):
                params = SamplingParams(temperature=0, max_tokens=30)
                engine.add_request(f"late{i}", [i + 10] * 5, params)
    assert any(plan.copies.pages for plan in plans)


def decode_plan(step, tables, params, context=1000):
    sequences = tuple(
        ScheduledSequence(
            f"request {at}",
            [-1],
            context + step,
            at,
            table,
            SampleSpec(params, 2**63 + at, context + step + 1, context, [], ()),
            step,
            2**63 + at,
        )
        for at, table in enumerate(tables)
    )
    return StepPlan(step, sequences, len(tables))


def test_what_is_known_is_not_sent_again() -> None:
    """Pages of 256 sequences of 8K tokens once, then a few bytes a sequence."""
    tables = [list(range(at * 512, (at + 1) * 512)) for at in range(256)]
    encoder, decoder, params = PlanEncoder(), PlanDecoder(), SamplingParams()
    first = through(encoder, decoder, decode_plan(0, tables, params))
    later = through(encoder, decoder, decode_plan(1, tables, params))
    assert first > 256 * 512
    assert later < 256 * 20
    tables[7].append(5)
    assert through(encoder, decoder, decode_plan(2, tables, params)) <= later + 8
    moved = StepPlan(3, decode_plan(3, tables, params).sequences, 256, Copies(pages=((1, 2),)))
    assert through(encoder, decoder, moved) > 256 * 512


def test_a_request_keeps_its_list_and_another_of_its_name_has_its_own() -> None:
    encoder, decoder, params = PlanEncoder(), PlanDecoder(), SamplingParams()
    table = [3]

    def received(step, table):
        return decoder.decode(encoder.encode(decode_plan(step, [table], params))).sequences[0].block_table

    first = received(0, table)
    table.append(9)
    assert received(1, table) is first and first == [3, 9]
    other = received(2, [3, 9])
    assert other is not first and other == first


def test_both_ends_forget_whom_no_plan_names() -> None:
    encoder, decoder, params = PlanEncoder(), PlanDecoder(), SamplingParams()
    one, two = [1, 2], [3, 4]
    through(encoder, decoder, decode_plan(0, [one, two], params))
    for step in range(1, 2 * REMEMBERED_STEPS):
        through(encoder, decoder, decode_plan(step, [one], params))
    assert len(encoder._known) == len(decoder._known) == 1
    through(encoder, decoder, decode_plan(200, [one, two], params))


def test_the_end_is_no_plan() -> None:
    empty = StepPlan(5, (), 0)
    assert PlanEncoder().encode(empty)[0] != END[0]
    through(PlanEncoder(), PlanDecoder(), empty)
