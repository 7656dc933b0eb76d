"""The offline API with the demo model and the real engine."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridserve.replicas.llm import LLM, SamplingParams, default_sampling_params

PROMPT = "def add(a, b):\n"
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    threads = torch.get_num_threads()
    yield LLM(str(demo_model), cache_memory_bytes=32 * 2**20, num_threads=1, show_progress=False)
    torch.set_num_threads(threads)


def assert_idle(llm: LLM) -> None:
    assert not llm.engine.has_unfinished()
    assert llm.engine.load().running == 0
    llm.engine.arena.check_integrity()


def test_defaults_are_those_of_generation_config(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_p=0.9, max_tokens=256)


def test_text_is_that_of_the_tokens(llm: LLM) -> None:
    outputs = llm.generate([PROMPT, "import os\n"], GREEDY, use_tqdm=False)
    for output in outputs:
        (answer,) = output.outputs
        assert 1 <= len(answer.token_ids) <= 12
        assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
        assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt or "")
    assert outputs[0].outputs[0].text != outputs[1].outputs[0].text
    metrics = outputs[0].metrics
    assert metrics is not None
    assert (
        0
        < metrics.arrival_time
        <= metrics.first_scheduled_time
        <= metrics.first_token_time
        <= metrics.finished_time
    )
    assert_idle(llm)


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=10)
    (alone,) = llm.generate(PROMPT, params, use_tqdm=False)
    others = [SamplingParams(max_tokens=5), params, SamplingParams(seed=9, temperature=0.3, max_tokens=15)]
    outputs = llm.generate(["class A:\n", PROMPT, "x = 1\n" * 20], others, use_tqdm=False)
    assert outputs[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_n_answers_are_the_answers_of_n_seeds(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, SamplingParams(n=3, seed=5, max_tokens=8), use_tqdm=False)
    seeds = [SamplingParams(seed=5 + i, max_tokens=8) for i in range(3)]
    singles = llm.generate([PROMPT] * 3, seeds, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    assert texts == [single.outputs[0].text for single in singles]
    assert len(set(texts)) > 1


def test_logprobs_of_greedy_tokens_are_the_highest(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    for token_id, row in zip(answer.token_ids, answer.logprobs, strict=True):
        assert len(row) == 3
        assert row[token_id].rank == 1
        assert row[token_id].logprob == max(entry.logprob for entry in row.values())
        assert row[token_id].decoded_token == llm.get_tokenizer().token_text(token_id)
    chosen = [row[i].logprob for i, row in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(math.fsum(chosen))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for token_id, row in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert row is not None
        assert token_id in row
        assert all(entry.logprob <= 0 for entry in row.values())


def test_a_stop_string_frees_the_request(llm: LLM) -> None:
    (plain,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)
    text = plain.outputs[0].text
    stop = text[3:5]
    params = SamplingParams(temperature=0, max_tokens=500, stop=stop)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    (answer,) = output.outputs
    assert answer.text == text[: text.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert plain.outputs[0].token_ids[: len(answer.token_ids)] == answer.token_ids
    assert_idle(llm)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], r"prompts\[1\]: prompt is empty"),
        ("", r"prompts\[1\]: prompt is empty"),
        ([8192], r"prompts\[1\]: prompt token 0 is 8192, outside the vocabulary of 8192"),
        ([5] * 9000, r"prompts\[1\]: prompt has 9000 tokens, but the context holds 8192"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM, bad: object, message: str) -> None:
    steps = llm.engine.load().steps
    with pytest.raises(ValueError, match=message):
        llm.generate([PROMPT, bad], GREEDY, use_tqdm=False)
    assert llm.engine.load().steps == steps
    assert_idle(llm)


def test_an_interrupt_leaves_it_usable(llm: LLM) -> None:
    (before,) = llm.generate(PROMPT, GREEDY, use_tqdm=False)

    def interrupt(prompt: int, answer: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, "import os\n"], GREEDY, use_tqdm=False, on_text=interrupt)
    assert_idle(llm)
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs == before.outputs


def test_chat_is_generate_on_the_rendered_conversation(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Write a function that adds two numbers."}]
    (output,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    ids = llm.get_tokenizer().encode_chat(conversation)
    assert output.prompt_token_ids == ids
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs == output.outputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "'/nowhere' does not exist"),
        ({"dtype": "int3"}, "dtype must be one of .*'int3'"),
        ({"max_model_len": 10_000}, "max_model_len is 10000"),
        ({"hf_overrides": {"model_type": "llama"}}, "'llama'"),
    ],
)
def test_a_wrong_option_is_named(demo_model: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": str(demo_model), "cache_memory_bytes": 8 * 2**20, "show_progress": False, **options})


def test_default_sampling_params() -> None:
    assert default_sampling_params({}) == SamplingParams()
    assert default_sampling_params(
        {"max_new_tokens": 7, "top_k": 20, "eos_token_id": (1,)}
    ) == SamplingParams(max_tokens=7, top_k=20)
    with pytest.raises(ValueError, match=r"generation_config.json: top_p must be in \(0, 1\], got 2"):
        default_sampling_params({"top_p": 2})
