"""The endpoints beside OpenAI's generation, on a real server."""

import json
import time

import httpx
import openai
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("idle")]

PROMPT = "def größe(n):\n"


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == ("demo", "model")
    assert model.model_extra == {"max_model_len": 2048}
    assert client.models.retrieve("demo") == model
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.models.retrieve("gpt-9")


def test_health_and_ready(server) -> None:
    for path, status in (("/health", "alive"), ("/ready", "ready")):
        answer = httpx.get(server.url + path)
        assert (answer.status_code, answer.json()) == (200, {"status": status})


def test_tokenize_and_detokenize(server, llm) -> None:
    answer = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()
    ids = llm.get_tokenizer().encode(PROMPT)
    assert answer == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()
    assert back == {"prompt": PROMPT}
    messages = [{"role": "user", "content": "hi"}]
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": messages}).json()
    assert chat["tokens"] == llm.get_tokenizer().encode_chat(messages)


def test_generate_plain_and_streamed(server, offline, llm) -> None:
    [[wanted]] = offline([PROMPT], temperature=0, max_tokens=20)
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20}
    whole = httpx.post(f"{server.url}/generate", json=body).json()
    prompt_tokens = len(llm.get_tokenizer().encode(PROMPT))
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(wanted.token_ids),
        "total_tokens": prompt_tokens + len(wanted.token_ids),
    }
    assert whole == {"text": wanted.text, "finish_reason": wanted.finish_reason, "usage": usage}
    with httpx.stream("POST", f"{server.url}/generate", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert "".join(event["text"] for event in events) == wanted.text
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["finish_reason"], events[-1]["usage"]) == (wanted.finish_reason, usage)


def test_metrics_count_an_answer(server, client: openai.OpenAI) -> None:
    before = server.metrics()
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=9, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    after = server.metrics()
    gained = {name: value - before.get(name, 0) for name, value in after.items()}
    assert gained["hybridserve_prompt_tokens_total"] == answer.usage.prompt_tokens
    assert gained["hybridserve_generation_tokens_total"] == 9
    assert gained["hybridserve_requests_total{length}"] == 1
    assert gained["hybridserve_time_to_first_token_seconds_count"] == 1
    assert gained["hybridserve_inter_token_latency_seconds_count"] == 8
    assert gained["hybridserve_steps_total"] >= 9
    assert after["hybridserve_units_limit"] > 0 and after["hybridserve_pages_limit"] > 0


def test_one_id_from_the_client_to_the_engine(server) -> None:
    request_id = "from-a-client"
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 3, "stream": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers={"x-request-id": request_id})
    assert answer.headers["x-request-id"] == request_id
    deadline = time.monotonic() + 30
    while len(lines := server.lines_of(request_id)) < 2:
        assert time.monotonic() < deadline, server.tail()
        time.sleep(0.1)
    by_component = {line["component"]: line for line in lines}
    assert by_component.keys() == {"ingress", "engine"}
    at_ingress, at_engine = by_component["ingress"], by_component["engine"]
    assert at_ingress["pool_replica"] == at_engine["replica"] != at_ingress["replica"]
    assert at_engine["pool"] == at_ingress["pool"] == "pool"
    assert (at_ingress["status"], at_ingress["generation_tokens"]) == (200, at_engine["generation_tokens"])
    assert 0 <= at_ingress["queue_s"] <= at_ingress["ttft_s"] <= at_ingress["duration_s"]
    assert PROMPT not in server.log.read_text()
