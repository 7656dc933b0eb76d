"""News that are joined say what they said one by one."""

from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.bus.joined import joined
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs


@st.composite
def news(draw: st.DrawFn) -> list[EngineOutput]:
    index, with_logprobs, outputs = draw(st.integers(0, 50)), draw(st.booleans()), []
    for _ in range(draw(st.integers(1, 6))):
        tokens = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        logprobs = tuple(TokenLogprobs(-0.5 * token, 1, (token,), (-0.5,)) for token in tokens)
        outputs.append(EngineOutput("a", index, tokens, logprobs if with_logprobs else ()))
        index += len(tokens)
    last = outputs.pop()
    reason = draw(st.sampled_from([None, "stop", "length"]))
    return [*outputs, EngineOutput("a", last.first_index, last.token_ids, last.logprobs, (), reason, 7)]


@given(news())
def test_nothing_is_lost_or_said_twice(outputs: list[EngineOutput]) -> None:
    whole = joined(outputs)
    assert whole.first_index == outputs[0].first_index
    assert whole.token_ids == sum((one.token_ids for one in outputs), ())
    assert whole.logprobs == sum((one.logprobs for one in outputs), ())
    assert (whole.finish_reason, whole.stop_token_id) == (outputs[-1].finish_reason, 7)


def test_what_only_the_first_says_stays() -> None:
    prompt = ((3, TokenLogprobs(-1.0, 1)),)
    first = EngineOutput("a", 0, (1,), prompt_logprobs=prompt, first_scheduled_time=2.5)
    whole = joined([first, EngineOutput("a", 1, (2,), num_preemptions=1)])
    assert (whole.prompt_logprobs, whole.first_scheduled_time, whole.num_preemptions) == (prompt, 2.5, 1)
