"""Streams: their chunks' shape, the same text as whole answers, and what a failure looks like."""

import pytest

from hybridserve.cluster.pool.interface import PoolBusy, PoolError, ReplicaFailed

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {
    COMPLETIONS: {"model": "demo", "prompt": "def f", "max_tokens": 64},
    CHAT: {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"prompt": "def f", "max_tokens": 64},
}
PATHS = tuple(BODIES)
OPENAI = (COMPLETIONS, CHAT)


def texts_of(path: str, events: list[dict]) -> dict[int, str]:
    """The text of each index."""
    texts: dict[int, str] = {}
    for event in events:
        if path == "/generate":
            texts[0] = texts.get(0, "") + event["text"]
            continue
        for choice in event["choices"]:
            text = choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


def whole_texts(caller, path: str, body: dict) -> dict[int, str]:
    answer = caller.post(path, body).json()
    if path == "/generate":
        return {0: answer["text"]}
    get = (lambda c: c["text"]) if path == COMPLETIONS else (lambda c: c["message"]["content"])
    return {choice["index"]: get(choice) for choice in answer["choices"]}


@pytest.mark.parametrize("tokens_per_news", [1, 3, 100])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_the_whole_answer_in_parts(caller, pool, path, tokens_per_news):
    pool.tokens_per_news = tokens_per_news
    for extra in ({}, {"stop": ["ïve 🙂"]}, {"max_tokens": 5}, {"seed": 1, "skip_special_tokens": False}):
        body = {**BODIES[path], **extra}
        assert texts_of(path, caller.events(path, body)) == whole_texts(caller, path, body)


@pytest.mark.parametrize("path", OPENAI)
def test_n_answers_side_by_side(caller, pool, path):
    pool.step_seconds = 0.001
    body = {**BODIES[path], "n": 3, "seed": 4}
    events = caller.events(path, body)
    assert texts_of(path, events) == whole_texts(caller, path, body)
    indexes = [choice["index"] for event in events for choice in event["choices"]]
    assert set(indexes) == {0, 1, 2}
    assert indexes != sorted(indexes)


@pytest.mark.parametrize("path", PATHS)
def test_no_chunk_ends_within_a_character(caller, pool, path):
    pool.text = "🙂é漢字🙃" * 3
    events = caller.events(path, BODIES[path])
    joined = texts_of(path, events)[0]
    assert joined == pool.text
    assert "\N{REPLACEMENT CHARACTER}" not in joined


def test_completion_chunks(caller, pool):
    pool.text = "one two"
    events = caller.events(COMPLETIONS, BODIES[COMPLETIONS])
    assert {event["object"] for event in events} == {"text_completion"}
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all("usage" not in event for event in events)


def test_chat_chunks(caller, pool):
    pool.text = "one two"
    events = caller.events(CHAT, BODIES[CHAT])
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])
    assert deltas[-1] == {}
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", OPENAI)
def test_usage_comes_last_with_no_choices(caller, path):
    body = {**BODIES[path], "n": 2}
    events = caller.events(path, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == caller.post(path, body).json()["usage"]
    assert all(event["usage"] is None for event in events[:-1])


@pytest.mark.parametrize("echo", [False, True])
def test_completion_logprobs_are_those_of_the_whole(caller, echo):
    body = {**BODIES[COMPLETIONS], "logprobs": 2, "echo": echo, "stop": "🙃"}
    whole = caller.post(COMPLETIONS, body).json()["choices"][0]
    joined: dict[str, list] = {}
    for event in caller.events(COMPLETIONS, body):
        for name, column in (event["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(column)
    assert joined == whole["logprobs"]


def test_chat_logprobs_are_those_of_the_whole(caller):
    body = {**BODIES[CHAT], "logprobs": True, "top_logprobs": 1}
    whole = caller.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    streamed = [
        entry
        for event in caller.events(CHAT, body)
        if event["choices"][0]["logprobs"] is not None
        for entry in event["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_pool_that_fails_before_the_first_token_is_a_503(caller, pool, path, stream):
    pool.failures = {0: PoolError("the replica died")}
    response = caller.post(path, {**BODIES[path], "stream": stream})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    error = response.json()["error"]
    assert (error["message"], error["code"]) == ("the replica died", "pool_unavailable")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_failed_for_good_is_named_with_the_request(caller, pool, path, stream):
    pool.failures = {0: ReplicaFailed("no other replica was there in time")}
    response = caller.post(path, {**BODIES[path], "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    error = response.json()["error"]
    assert error["code"] == "replica_failed"
    assert pool.submitted[0].request_id.startswith(error["request_id"])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_busy_pool_is_a_429(caller, pool, path, stream):
    pool.failures = {0: PoolBusy("all 4 places are taken", 7, "queue_deadline")}
    response = caller.post(path, {**BODIES[path], "stream": stream})
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.headers["x-hybridserve-reject-reason"] == "queue_deadline"
    assert response.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("n", [1, 2])
def test_a_pool_that_fails_later_ends_the_stream_with_an_error(caller, pool, parse_events, path, n):
    pool.failures = {3: PoolError("the replica died")}
    several = {} if path == "/generate" else {"n": n}
    response = caller.post(path, {**BODIES[path], **several, "stream": True})
    assert response.status_code == 200
    *events, failure, done = parse_events(response.text)
    assert events and done == "[DONE]"
    error = failure["error"]
    assert (error["message"], error["type"]) == ("the replica died", "server_error")
    assert error["request_id"] == pool.submitted[0].request_id.rpartition("-")[0]
    if path != "/generate":
        assert {event["id"] for event in events} == {error["request_id"]}
    assert len(pool.ended) == len(pool.submitted)
    assert caller.post(path, {**BODIES[path], **several}).status_code == 503


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_refuses_is_a_400(caller, pool, path):
    pool.failures = {0: ValueError("prompt of 9 tokens needs 3 pages, the arena has 2")}
    response = caller.post(path, {**BODIES[path], "stream": True})
    assert response.status_code == 400
    assert "needs 3 pages" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_the_engine_gives_up_is_an_error(caller, pool, parse_events, path):
    pool.engine_error_at = 2
    response = caller.post(path, BODIES[path])
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    streamed = parse_events(caller.post(path, {**BODIES[path], "stream": True}).text)
    assert streamed[-2]["error"]["message"] == "NaN in logits"


@pytest.mark.parametrize("path", PATHS)
def test_a_surprise_shows_no_trace(make_caller, pool, parse_events, path):
    pool.failures = {2: RuntimeError("secret detail")}
    response = make_caller().post(path, {**BODIES[path], "stream": True})
    error = parse_events(response.text)[-2]["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("path", PATHS)
def test_a_pool_without_info_is_a_503(caller, pool, path):
    pool.info_failure = PoolError("no replica answers")
    assert caller.post(path, BODIES[path]).status_code == 503
    pool.info_failure = None
    assert caller.post(path, BODIES[path]).status_code == 200
