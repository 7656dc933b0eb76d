"""The offline API over an engine whose answers are known."""

from collections.abc import Callable

import pytest

from hybridserve.replicas.llm import LLM, SamplingParams
from hybridserve.replicas.outputs import Logprob
from hybridserve.replicas.text.tokenizer import Tokenizer

Build = Callable[[dict[str, str]], object]
ANSWERS = {"one": " is a number", "two": " is another", "€": "€uro 中文"}


def test_outputs_come_in_the_order_of_the_prompts(engine_for: Build, tokenizer: Tokenizer) -> None:
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer)
    outputs = llm.generate(["two", tokenizer.encode("€"), {"prompt": "one"}], SamplingParams(max_tokens=99))
    assert [o.outputs[0].text for o in outputs] == [" is another", "€uro 中文", " is a number"]
    assert [o.prompt for o in outputs] == ["two", None, "one"]
    assert outputs[1].prompt_token_ids == tokenizer.encode("€")
    assert len({o.request_id for o in outputs}) == 3
    for output in outputs:
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.stop_reason, answer.index) == ("stop", None, 0)
        assert answer.token_ids[-1] == 2
        assert answer.logprobs is None
        assert answer.cumulative_logprob is None
        assert output.prompt_logprobs is None
        assert output.finished


def test_times_are_in_order(engine_for: Build, tokenizer: Tokenizer) -> None:
    (output,) = LLM.from_engine(engine_for(ANSWERS), tokenizer).generate("one", SamplingParams(max_tokens=3))
    metrics = output.metrics
    assert metrics is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
    assert (metrics.first_scheduled_time, metrics.num_preemptions) == (1.0, 1)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 3


def test_one_params_a_prompt(engine_for: Build, tokenizer: Tokenizer) -> None:
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer)
    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)]
    outputs = llm.generate(["one", "two"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2]
    with pytest.raises(ValueError, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate(["one", "two", "€"], params)
    with pytest.raises(ValueError, match=r"sampling_params\[0\] must be SamplingParams, got dict"):
        llm.generate("one", [{}])


def test_default_params(engine_for: Build, tokenizer: Tokenizer) -> None:
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer, SamplingParams(max_tokens=2))
    assert len(llm.generate("one")[0].outputs[0].token_ids) == 2


def test_stop_string_ends_the_request(engine_for: Build, tokenizer: Tokenizer) -> None:
    engine = engine_for({"p": "first END second and a lot more"})
    llm = LLM.from_engine(engine, tokenizer)
    (output,) = llm.generate("p", SamplingParams(max_tokens=99, stop=["END"], logprobs=0))
    (answer,) = output.outputs
    assert answer.text == "first "
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "END")
    used = tokenizer.decode(answer.token_ids)
    assert "first END" in used
    assert "first END" not in tokenizer.decode(answer.token_ids[:-1])
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    assert engine.aborted == [output.request_id]


def test_stop_token_id_is_named(engine_for: Build, tokenizer: Tokenizer) -> None:
    second = tokenizer.encode(ANSWERS["one"])[1]
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer)
    (output,) = llm.generate("one", SamplingParams(max_tokens=99, stop_token_ids=[second]))
    assert output.outputs[0].stop_reason == second
    assert output.outputs[0].token_ids == tokenizer.encode(ANSWERS["one"])[:2]
    # it counts, but it is not shown unless asked for
    assert output.outputs[0].text == tokenizer.decode(tokenizer.encode(ANSWERS["one"])[:1])
    params = SamplingParams(max_tokens=99, stop_token_ids=[second], include_stop_str_in_output=True)
    (output,) = llm.generate("one", params)
    assert output.outputs[0].text == tokenizer.decode(tokenizer.encode(ANSWERS["one"])[:2])


def test_logprobs(engine_for: Build, tokenizer: Tokenizer) -> None:
    llm = LLM.from_engine(engine_for({"one two": "€"}), tokenizer)
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=2)
    (output,) = llm.generate("one two", params)
    first, second = output.outputs[0].token_ids
    assert output.outputs[0].logprobs == [
        {first: Logprob(-0.5, 2, r"bytes:\xe2"), 7: Logprob(-0.25, 1, tokenizer.token_text(7))},
        {second: Logprob(-0.5, 2, r"bytes:\x82"), 7: Logprob(-0.25, 1, tokenizer.token_text(7))},
    ]
    assert output.outputs[0].cumulative_logprob == -1.0
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [next(iter(row)) for row in output.prompt_logprobs[1:]] == prompt[1:]


def test_n_answers_have_n_seeds(engine_for: Build, tokenizer: Tokenizer) -> None:
    engine = engine_for(ANSWERS)
    seen = []
    add = engine.add_request
    engine.add_request = lambda *args: (seen.append(args[2]), add(*args))
    params = SamplingParams(n=3, seed=2**64 - 2, max_tokens=2, prompt_logprobs=0)
    (output,) = LLM.from_engine(engine, tokenizer).generate("one", params)
    assert [p.seed for p in seen] == [2**64 - 2, 2**64 - 1, 0]
    assert [p.prompt_logprobs for p in seen] == [0, None, None]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert output.prompt_logprobs is not None
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 3


@pytest.mark.parametrize("bad", [[], 3, [1, "x"], {"prompt": 1}])
def test_one_bad_prompt_runs_nothing(engine_for: Build, tokenizer: Tokenizer, bad: object) -> None:
    engine = engine_for(ANSWERS)
    llm = LLM.from_engine(engine, tokenizer)
    with pytest.raises(ValueError, match=r"prompts\[1\]: "):
        llm.generate(["one", bad, "two"])
    assert engine.steps == 0
    assert not engine.has_unfinished()
    assert llm.generate("one", SamplingParams(max_tokens=99))[0].outputs[0].text == ANSWERS["one"]


def test_no_prompts_no_outputs(engine_for: Build, tokenizer: Tokenizer) -> None:
    assert LLM.from_engine(engine_for({}), tokenizer).generate([]) == []


def test_an_interrupt_leaves_the_engine_empty(engine_for: Build, tokenizer: Tokenizer) -> None:
    engine = engine_for(ANSWERS)
    engine.interrupt_at = 2
    llm = LLM.from_engine(engine, tokenizer)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=99))
    assert not engine.has_unfinished()
    assert len(engine.aborted) == 2
    assert llm.generate("two", SamplingParams(max_tokens=99))[0].outputs[0].text == ANSWERS["two"]


def test_an_engine_error_is_that_answers_alone(engine_for: Build, tokenizer: Tokenizer) -> None:
    engine = engine_for(ANSWERS)
    engine.fail = "0"
    outputs = LLM.from_engine(engine, tokenizer).generate(["one", "two"], SamplingParams(max_tokens=99))
    failed, whole = (o.outputs[0] for o in outputs)
    assert (failed.finish_reason, failed.stop_reason) == ("error", "the logits held NaN")
    assert failed.token_ids == tokenizer.encode(ANSWERS["one"])[:1]
    assert whole.text == ANSWERS["two"]


def test_text_is_heard_as_it_comes(engine_for: Build, tokenizer: Tokenizer) -> None:
    heard: dict[int, list[str]] = {0: [], 1: []}
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer)
    outputs = llm.generate(
        ["one", "€"],
        SamplingParams(max_tokens=99),
        use_tqdm=False,
        on_text=lambda prompt, answer, text: heard[prompt].append(text),
    )
    assert ["".join(heard[i]) for i in (0, 1)] == [o.outputs[0].text for o in outputs]
    assert len(heard[0]) > 1


def test_progress_is_drawn_only_when_asked(
    engine_for: Build, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = LLM.from_engine(engine_for(ANSWERS), tokenizer)
    llm.generate("one", use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["one", "two"], use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err


def test_chat(engine_for: Build, tokenizer: Tokenizer) -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    engine = engine_for({rendered: "hello", rendered.removesuffix("<|im_start|>assistant\n"): "or so"})
    llm = LLM.from_engine(engine, tokenizer, SamplingParams(max_tokens=99))
    conversation = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(conversation)
    assert (output.prompt, output.outputs[0].text) == (rendered, "hello")
    assert [o.outputs[0].text for o in llm.chat([conversation, conversation])] == ["hello", "hello"]
    assert llm.chat(conversation, add_generation_prompt=False)[0].outputs[0].text == "or so"
    with pytest.raises(ValueError, match=r"prompts\[1\]: the chat template refuses"):
        llm.chat([conversation, [{"role": "user"}]])
    with pytest.raises(ValueError, match=r"prompts\[0\]: a conversation is a list"):
        llm.chat([[]])


def test_get_tokenizer(engine_for: Build, tokenizer: Tokenizer) -> None:
    assert LLM.from_engine(engine_for({}), tokenizer).get_tokenizer() is tokenizer
