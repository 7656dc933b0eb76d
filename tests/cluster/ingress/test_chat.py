"""/v1/chat/completions, whole answers: messages, template, log-probabilities, counts."""

import pytest

PATH = "/v1/chat/completions"


def chat(caller, content: object = "hi", **fields):
    body = {"model": "demo", "messages": [{"role": "user", "content": content}], **fields}
    response = caller.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer(caller, pool, tokenizer):
    pool.text = "hello 🙂"
    answer = chat(caller)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello 🙂", "refusal": None}
    assert choice["finish_reason"] == "stop"
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    made = len(tokenizer.encode(pool.text)) + 1
    assert pool.submitted[0].prompt_token_ids == tuple(prompt)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == made
    assert answer["usage"]["total_tokens"] == len(prompt) + made


def test_without_max_tokens_the_context_is_the_limit(caller, pool):
    answer = chat(caller)
    assert pool.submitted[0].params.max_tokens == 256 - answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(caller, pool, field):
    assert chat(caller, **{field: 2})["usage"]["completion_tokens"] == 2


def test_text_parts_are_joined_by_newlines(caller, pool):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(caller, parts)
    chat(caller, "one\ntwo")
    assert pool.submitted[0].prompt_token_ids == pool.submitted[1].prompt_token_ids


def test_roles(caller, pool, tokenizer):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    assert caller.post(PATH, {"messages": messages}).status_code == 200
    seen = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "42"},
    ]
    assert pool.submitted[0].prompt_token_ids == tuple(tokenizer.encode_chat(seen))


def test_the_generation_prompt_can_be_left_out(caller, pool, tokenizer):
    chat(caller, add_generation_prompt=False)
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert pool.submitted[0].prompt_token_ids == tuple(ids)


def test_n_answers(caller, pool):
    answer = chat(caller, n=3, seed=5)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [f" {seed} done" in text for seed, text in zip((5, 6, 7), texts, strict=True)] == [True] * 3


def test_logprobs(caller, pool, tokenizer):
    pool.text = "a 🙂"
    choice = chat(caller, logprobs=True, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    ids = [*tokenizer.encode(pool.text), 2]
    assert [entry["token"] for entry in content] == [tokenizer.token_text(i) for i in ids]
    text = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert text.decode() == "a 🙂"
    assert content[0]["logprob"] == -1.5
    top = content[0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.25, -1.5]
    assert top[0]["token"] == tokenizer.token_text(ids[0] + 1)
    assert set(top[0]) == {"token", "logprob", "bytes"}


def test_logprobs_without_alternatives(caller, pool):
    choice = chat(caller, logprobs=True)["choices"][0]
    assert {tuple(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {()}


def test_prompt_logprobs(caller):
    answer = chat(caller, prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
