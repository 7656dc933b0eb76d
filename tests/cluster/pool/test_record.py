"""Outputs put together and cut again."""

from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.bus.stream import after
from hybridserve.cluster.pool.record import OutputRecord
from hybridserve.replicas.engine.plan import EngineOutput, TokenLogprobs


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8), st.data())
def test_merged_and_cut_anywhere(sizes: list[int], data: st.DataObject) -> None:
    record = OutputRecord("r")
    prompt_logprobs = ((3, TokenLogprobs(-1.0, 2)),)
    count = 0
    for size in sizes:
        tokens = tuple(range(count, count + size))
        logprobs = tuple(TokenLogprobs(-float(t), 1) for t in tokens)
        record.append(EngineOutput("r", count, tokens, logprobs, prompt_logprobs if count == 0 else ()))
        count += size
    record.append(EngineOutput("r", count, finish_reason="stop"))
    merged = record.merged()
    assert merged.token_ids == tuple(range(count))
    assert merged.prompt_logprobs == prompt_logprobs
    assert merged.finish_reason == "stop"
    index = data.draw(st.integers(0, count))
    rest = after(merged, index)
    assert rest.token_ids == tuple(range(index, count))
    assert [one.logprob for one in rest.logprobs] == [-float(t) for t in rest.token_ids]
    assert rest.prompt_logprobs == (prompt_logprobs if index == 0 else ())
    assert rest.finish_reason == "stop"
