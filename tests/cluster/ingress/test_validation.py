"""Every bad request is a 4xx in OpenAI's shape that names the field and the value, and reaches no pool."""

import json

import pytest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
GENERATE = "/generate"


def good(path: str) -> dict[str, object]:
    if path == CHAT:
        return {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    return {"model": "demo", "prompt": "hi"} if path == COMPLETIONS else {"prompt": "hi"}


def check(response, status: int, param: str | None, *shown: str) -> dict[str, object]:
    """The error's shape, its field, and that its message shows these."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    for text in shown:
        assert text in error["message"], error
    return error


SHARED = [
    ({"max_tokens": 0}, "max_tokens", "0"),
    ({"max_tokens": -5}, "max_tokens", "-5"),
    ({"max_tokens": "many"}, "max_tokens", "'many'"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"max_tokens": True}, "max_tokens", "True"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"temperature": float("inf")}, "temperature", "inf"),
    ({"temperature": "hot"}, "temperature", "'hot'"),
    ({"temperature": 10**400}, "temperature", "10000"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_p": 1.5}, "top_p", "1.5"),
    ({"top_p": float("nan")}, "top_p", "nan"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"min_p": 2}, "min_p", "2"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"seed": "x"}, "seed", "'x'"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"stop": [f"s{i}" for i in range(1000)]}, "stop", "1000"),
    ({"stop": [""]}, "stop", "''"),
    ({"stop": ["x" * 5000]}, "stop", "5000"),
    ({"stop": {"a": 1}}, "stop", "{'a': 1}"),
    ({"stop": [1]}, "stop[0]", "1"),
    ({"stop_token_ids": [8192]}, "stop_token_ids", "8192"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"logit_bias": {"8192": 1}}, "logit_bias", "8192"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "'five'"),
    ({"logit_bias": {"5": 1000}}, "logit_bias", "1000"),
    ({"logit_bias": [1]}, "logit_bias", "[1]"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens", "5"),
    ({"min_tokens": 999}, "min_tokens", "999"),
    ({"max_tokens": 256}, "max_tokens", "256"),
    ({"max_tokens": 10**30}, "max_tokens", "256"),
    ({"stream": "yes"}, "stream", "'yes'"),
    ({"ignore_eos": 1}, "ignore_eos", "1"),
    ({"surprise": 1}, "surprise", "surprise"),
    ({"model": 7}, "model", "7"),
]
OPENAI = [
    ({"n": 0}, "n", "0"),
    ({"n": 129}, "n", "129"),
    ({"n": "two"}, "n", "'two'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "usage"),
    ({"prompt_logprobs": 65}, "prompt_logprobs", "65"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
]
OF_COMPLETIONS = [
    ({"prompt": {}}, "prompt", "{}"),
    ({"prompt": ""}, "prompt", "''"),
    ({"prompt": []}, "prompt", "[]"),
    ({"prompt": [[]]}, "prompt", "[]"),
    ({"prompt": ["a", 1]}, "prompt", "['a', 1]"),
    ({"prompt": [1, True]}, "prompt", "True"),
    ({"prompt": [1, 8192]}, "prompt", "8192"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [10**25]}, "prompt", str(10**25)),
    ({"prompt": None}, "prompt", "None"),
    ({"prompt": ["a"] * 129}, "prompt", "129"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "130"),
    ({"logprobs": 65}, "logprobs", "65"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"best_of": 3}, "best_of", "3"),
    ({"suffix": "end"}, "suffix", "'end'"),
    ({"prompt": [1] * 256}, "prompt", "256"),
    ({"messages": []}, "messages", "messages"),
]
OF_CHAT = [
    ({"messages": []}, "messages", "[]"),
    ({"messages": "hi"}, "messages", "'hi'"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "'wizard'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "image"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "mood"),
    ({"messages": [{"role": "user", "content": "x " * 300}]}, "messages", "256"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
    ({"max_completion_tokens": 300}, "max_completion_tokens", "300"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens", "4"),
    ({"top_logprobs": 2}, "top_logprobs", "2"),
    ({"logprobs": True, "top_logprobs": 65}, "top_logprobs", "65"),
    ({"logprobs": 1}, "logprobs", "1"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object"),
    ({"tools": [{"type": "function"}]}, "tools", "function"),
    ({"tool_choice": "required"}, "tool_choice", "'required'"),
    ({"chat_template_kwargs": {"messages": []}}, "messages", "messages"),
    ({"prompt": "x"}, "prompt", "prompt"),
]
CASES = [
    *((path, *case) for path in (COMPLETIONS, CHAT, GENERATE) for case in SHARED),
    *((path, *case) for path in (COMPLETIONS, CHAT) for case in OPENAI),
    *((COMPLETIONS, *case) for case in OF_COMPLETIONS),
    *((CHAT, *case) for case in OF_CHAT),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "change", "param", "shown"), CASES, ids=lambda value: str(value)[:40])
def test_a_bad_field_is_named_with_its_value(caller, pool, path, change, param, shown, stream):
    body = {**good(path), **change}
    body.setdefault("stream", stream and "stream_options" not in change and "prompt_logprobs" not in change)
    check(caller.post(path, body), 400, param, shown)
    assert pool.submitted == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_unknown_model(caller, pool, path):
    error = check(caller.post(path, {**good(path), "model": "gpt-9"}), 404, "model", "gpt-9", "demo")
    assert error["code"] == "model_not_found"
    assert pool.submitted == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_megabytes_are_refused_without_tokenising(caller, tokenizer, monkeypatch, path):
    text = "The quick brown fox jumps over it. " * 200_000

    def tokenise(*args: object, **options: object) -> list[int]:
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(tokenizer, "encode", tokenise)
    body = {**good(path), "prompt": text}
    if path == CHAT:
        body = {**good(path), "messages": [{"role": "user", "content": text}]}
    name = "messages" if path == CHAT else "prompt"
    error = check(caller.post(path, body), 400, name, f"{name} has at least", "256 tokens")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_beyond_the_context_says_both_numbers(caller, tokenizer, path):
    words = "word " * 400
    body = {**good(path), "prompt": words}
    count = len(tokenizer.encode(words))
    if path == CHAT:
        messages = [{"role": "user", "content": words}]
        body = {**good(path), "messages": messages}
        count = caller.post("/tokenize", {"messages": messages}).json()["count"]
    error = check(
        caller.post(path, body), 400, "messages" if path == CHAT else "prompt", str(count), "256 tokens"
    )
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'prompt': 1}",
        b"\xff\xfe{}",
        b'{"prompt": "\xe9"}',
        b'{"prompt": "\\ud800"}',
        b"[1]",
        b"null",
        b'"text"',
        b"[" * 200_000,
        b'{"metadata": ' + b'{"a":' * 200_000,
        b'{"seed": ' + b"9" * 6000 + b"}",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_body_that_is_no_json_object(caller, path, content):
    error = check(caller.request("POST", path, content=content), 400, None, "body")
    assert error["code"] == "invalid_json"


def test_deep_but_valid_json_is_told_by_its_field(caller):
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    body = {**good(COMPLETIONS), "prompt": deep}
    check(caller.post(COMPLETIONS, body), 400, "prompt", "[[")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, GENERATE])
def test_a_missing_prompt(caller, path):
    param = "messages" if path == CHAT else "prompt"
    check(caller.post(path, {}), 400, param, "required")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_tokenize(caller, body, param):
    check(caller.post("/tokenize", body), 400, param, param)


@pytest.mark.parametrize(
    ("tokens", "param"), [(["a"], "tokens[0]"), ([9000], "tokens"), ([-1], "tokens"), (3, "tokens")]
)
def test_bad_detokenize(caller, tokens, param):
    check(caller.post("/detokenize", {"tokens": tokens}), 400, param, "tokens")


def test_wrong_paths_and_methods(caller):
    error = check(caller.get("/v2/completions"), 404, None, "GET /v2/completions")
    assert error["code"] == "not_found"
    check(caller.get("/v1/models/other"), 404, "model", "other")
    response = caller.get("/v1/completions")
    error = check(response, 405, None, "POST")
    assert error["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    check(caller.post("/v1/completions/", good(COMPLETIONS)), 404, None)


def test_the_message_of_a_huge_value_is_short(caller):
    response = caller.post(COMPLETIONS, {**good(COMPLETIONS), "temperature": "x" * 100_000})
    assert len(response.json()["error"]["message"]) < 500


def test_neutral_values_of_unsupported_fields_are_taken(caller):
    body = {
        **good(CHAT),
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "stop": None,
        "logprobs": None,
        "n": None,
        "max_tokens": 4,
        "max_completion_tokens": 4,
    }
    assert caller.post(CHAT, body).status_code == 200
    body = {**good(COMPLETIONS), "best_of": 2, "n": 2, "suffix": None, "user": "me", "logit_bias": {"5": 1}}
    assert caller.post(COMPLETIONS, body).status_code == 200


def test_nan_is_not_echoed_as_bare_nan(caller):
    response = caller.post(COMPLETIONS, {**good(COMPLETIONS), "temperature": float("nan")})
    json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
