"""What clients of a real server read is what the same model says offline, whole, streamed, and in company."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle")]

PROMPTS = [
    "def fibonacci(n):",
    "import os\n\ndef list_files(path):",
    '# naïve café — 数を足す関数 🎉\ndef add(a, b):\n    """',
    'class Größe:\n    """Überprüft die Länge, жизнь, 生活."""\n',
    "x = 1\n" * 200,
]
CHATS = [
    [{"role": "user", "content": "Write a function that reverses a string."}],
    [
        {"role": "system", "content": "Answer in Python."},
        {"role": "user", "content": "Summiere die Länge aller Wörter: «ünïcödé 🚀»."},
    ],
]
GREEDY = {"temperature": 0, "max_tokens": 48}


def read_completion(stream) -> tuple[str, str | None, int, int]:
    """(text, finish reason, completion tokens, chunks with text) of a stream that includes its usage."""
    text, reason, usage, chunks = "", None, None, 0
    for part in stream:
        if part.usage is not None:
            usage = part.usage
        for choice in part.choices:
            text += choice.text
            chunks += bool(choice.text)
            reason = choice.finish_reason or reason
    assert usage is not None
    return text, reason, usage.completion_tokens, chunks


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_completions_are_the_offline_ones(client: openai.OpenAI, offline, llm, prompt: str) -> None:
    [[wanted]] = offline([prompt], **GREEDY)
    whole = client.completions.create(model="demo", prompt=prompt, **GREEDY)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage is not None
    assert whole.usage.completion_tokens == len(wanted.token_ids)
    assert whole.usage.prompt_tokens == len(llm.get_tokenizer().encode(prompt))
    stream = client.completions.create(
        model="demo", prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    text, reason, tokens, chunks = read_completion(stream)
    assert (text, reason, tokens) == (wanted.text, wanted.finish_reason, len(wanted.token_ids))
    # it came in pieces
    assert chunks > len(wanted.token_ids) // 4


@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
def test_chats_are_the_offline_ones(client: openai.OpenAI, offline, messages) -> None:
    [[wanted]] = offline([messages], **GREEDY)
    whole = client.chat.completions.create(model="demo", messages=messages, **GREEDY)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage is not None and whole.usage.completion_tokens == len(wanted.token_ids)
    text, roles, reasons, usages = "", [], [], []
    for part in client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}, **GREEDY
    ):
        usages += [part.usage] if part.usage is not None else []
        for choice in part.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (text, roles, reasons) == (wanted.text, ["assistant"], [wanted.finish_reason])
    assert [usage.model_dump() for usage in usages] == [whole.usage.model_dump()]


def test_several_prompts_and_token_ids_in_one_request(client: openai.OpenAI, offline, llm) -> None:
    wanted = [answers[0].text for answers in offline(PROMPTS[:3], **GREEDY)]
    texts = client.completions.create(model="demo", prompt=PROMPTS[:3], **GREEDY).choices
    assert [choice.text for choice in texts] == wanted
    ids = [llm.get_tokenizer().encode(prompt) for prompt in PROMPTS[:3]]
    choices = client.completions.create(model="demo", prompt=ids, **GREEDY).choices
    assert [choice.text for choice in choices] == wanted


def test_a_seed_says_the_same_over_http_and_offline(client: openai.OpenAI, offline) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 32, "n": 3, "seed": 11}
    [wanted] = offline([PROMPTS[0]], **sampling)
    answer = client.completions.create(model="demo", prompt=PROMPTS[0], **sampling)
    assert [choice.text for choice in answer.choices] == [one.text for one in wanted]
    assert len({one.text for one in wanted}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in wanted)
    texts = ["", "", ""]
    for part in client.completions.create(model="demo", prompt=PROMPTS[0], stream=True, **sampling):
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in wanted]


def test_what_is_not_said_comes_from_generation_config(client: openai.OpenAI, offline) -> None:
    [[wanted]] = offline([PROMPTS[1]], temperature=0.7, top_p=0.9, seed=3, max_tokens=24)
    answer = client.completions.create(model="demo", prompt=PROMPTS[1], seed=3, max_tokens=24)
    assert answer.choices[0].text == wanted.text


def test_logprobs_are_the_offline_ones(client: openai.OpenAI, offline, llm) -> None:
    [[wanted]] = offline([PROMPTS[0]], temperature=0, max_tokens=6, logprobs=2)
    assert wanted.logprobs is not None
    values = [row[i].logprob for i, row in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    said = [llm.get_tokenizer().token_text(i) for i in wanted.token_ids]
    asked = {"model": "demo", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 6, "logprobs": 2}
    logprobs = client.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == said
    assert logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    for got, row in zip(logprobs.top_logprobs or [], wanted.logprobs, strict=True):
        assert got is not None
        assert got == pytest.approx(
            {llm.get_tokenizer().token_text(i): entry.logprob for i, entry in row.items()}, abs=1e-4
        )
    streamed = [part.choices[0].logprobs for part in client.completions.create(**asked, stream=True)]
    assert [text for part in streamed if part for text in part.tokens or []] == said


def test_chat_logprobs_are_the_offline_ones(client: openai.OpenAI, offline) -> None:
    [[wanted]] = offline([CHATS[0]], temperature=0, max_tokens=6, logprobs=2)
    assert wanted.logprobs is not None
    values = [row[i].logprob for i, row in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    answer = client.chat.completions.create(
        model="demo", messages=CHATS[0], temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx(values, abs=1e-4)
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * len(values)
    said = bytes(byte for entry in logprobs.content for byte in entry.bytes or [])
    assert said.decode() == answer.choices[0].message.content


def test_a_stop_string_ends_the_answer_where_it_does_offline(client: openai.OpenAI, offline) -> None:
    [[plain]] = offline([PROMPTS[0]], **GREEDY)
    stop = plain.text[9:13]
    [[wanted]] = offline([PROMPTS[0]], stop=[stop, "never said"], **GREEDY)
    assert wanted.stop_reason == stop
    asked = {"model": "demo", "prompt": PROMPTS[0], "stop": [stop, "never said"], **GREEDY}
    whole = client.completions.create(**asked)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (wanted.text, "stop")
    assert whole.choices[0].model_extra == {"stop_reason": stop}
    assert whole.usage is not None and whole.usage.completion_tokens == len(wanted.token_ids)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    assert read_completion(stream)[:3] == (wanted.text, "stop", len(wanted.token_ids))


def test_sixteen_clients_at_once_read_their_own_texts(client: openai.OpenAI, offline) -> None:
    prompts = [f"def function_{i}(a, b):\n    # {'ab' * i}\n" for i in range(16)]
    wanted = [answers[0].text for answers in offline(prompts, **GREEDY)]
    assert len(set(wanted)) > 8

    def read(prompt: str) -> str:
        stream = client.completions.create(
            model="demo", prompt=prompt, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        return read_completion(stream)[0]

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(read, prompts)) == wanted
