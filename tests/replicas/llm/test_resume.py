"""The demo model's answers, cut and gone on with in an engine that knows only their tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridserve.replicas.engine.plan import EngineOutput
from hybridserve.replicas.llm import LLM, SamplingParams
from hybridserve.replicas.text.answer_text import AnswerText

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    threads = torch.get_num_threads()
    yield LLM(str(demo_model), cache_memory_bytes=32 * 2**20, num_threads=1, show_progress=False)
    torch.set_num_threads(threads)


def news(llm: LLM, params: SamplingParams, tokens: list[int] | None = None) -> list[EngineOutput]:
    """All news of one request, begun anew or after `tokens`."""
    prompt = llm.get_tokenizer().encode(PROMPT)
    llm.engine.add_request("r", prompt, params, tokens or [])
    outputs = []
    while llm.engine.has_unfinished():
        outputs += llm.engine.step()
    return outputs


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 2**63},
        {
            "temperature": 0.7,
            "seed": 1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
        },
        {"temperature": 0.0, "frequency_penalty": 0.5, "min_tokens": 30},
        {"temperature": 0.9, "seed": 3, "logit_bias": {11: 3.0}, "ignore_eos": True},
    ],
    ids=["greedy", "sampled", "filtered", "penalties", "greedy penalties", "biased"],
)
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_the_same_tokens_and_the_same_end(llm: LLM, sampling: dict, part: float) -> None:
    params = SamplingParams(max_tokens=40, **sampling)
    whole = news(llm, params)
    wanted = tokens_of(whole)
    # after the first token, before the last, and between
    cut = round(1 + part * (len(wanted) - 2))
    assert 0 < cut < len(wanted)
    rest = news(llm, params, wanted[:cut])
    assert tokens_of(rest) == wanted[cut:]
    assert [output.first_index for output in rest] == list(range(cut, len(wanted)))
    assert rest[-1].finish_reason == whole[-1].finish_reason


def test_log_probabilities_go_on_and_the_prompts_are_not_told_again(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=1)
    whole = news(llm, params)
    rest = news(llm, params, tokens_of(whole)[:8])
    assert whole[0].prompt_logprobs and not any(output.prompt_logprobs for output in rest)
    for wanted, output in zip(whole[8:], rest, strict=True):
        [a], [b] = wanted.logprobs, output.logprobs
        assert (a.rank, a.top_token_ids) == (b.rank, b.top_token_ids)
        assert b.logprob == pytest.approx(a.logprob, abs=1e-3)


def test_a_stop_string_across_the_cut_ends_the_answer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=24)
    tokens = tokens_of(news(llm, params))
    cut = 10
    stop = tokenizer.decode(tokens[cut - 3 : cut + 1])
    assert stop not in tokenizer.decode(tokens[:cut])
    params = SamplingParams(temperature=0, max_tokens=24, stop=(stop,))

    def text(outputs: list[EngineOutput], shown: AnswerText) -> tuple[str, str | None, object]:
        joined = ""
        for output in outputs:
            piece = shown.take(output)
            joined += piece.text
            if piece.finish_reason is not None:
                return joined, piece.finish_reason, piece.stop_reason
        return joined, None, None

    prompt = tokenizer.encode(PROMPT)
    whole = news(llm, params)
    wanted = text(whole, AnswerText(tokenizer, prompt, params))
    assert wanted[1:] == ("stop", stop)
    shown = AnswerText(tokenizer, prompt, params)
    begun = text(whole[:cut], shown)
    assert begun[1] is None
    rest = text(news(llm, params, tokens[:cut]), shown)
    assert (begun[0] + rest[0], *rest[1:]) == wanted
