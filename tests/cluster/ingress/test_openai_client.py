"""The official client against a real server: what it sends is understood, what it gets it can read."""

from collections.abc import Callable

import openai
import pytest

from hybridserve.cluster.pool.interface import PoolError


@pytest.fixture
def client(serve: Callable[..., int]) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{serve()}/v1", api_key="none", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "hybridserve"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_completion_and_its_stream(client, pool):
    pool.text = " héllo 🙂"
    whole = client.completions.create(model="demo", prompt="a", logprobs=1, max_tokens=50)
    assert whole.choices[0].text == pool.text
    assert whole.choices[0].logprobs.token_logprobs[0] == -1.5
    stream = client.completions.create(
        model="demo", prompt="a", max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == pool.text
    assert chunks[-1].usage == whole.usage


def test_chat_and_its_stream(client, pool):
    pool.text = " héllo 🙂"
    ask = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == pool.text
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob == -0.25
    chunks = list(client.chat.completions.create(**ask, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == pool.text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_clients_own_stream_helper(client, pool):
    pool.text = " héllo 🙂"
    ask = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    with client.chat.completions.stream(**ask, logprobs=True) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == pool.text


def test_extra_fields_of_vllm(client, pool):
    client.completions.create(
        model="demo", prompt="a", extra_body={"top_k": 3, "min_p": 0.1, "ignore_eos": True}
    )
    params = pool.submitted[0].params
    assert (params.top_k, params.min_p, params.ignore_eos) == (3, 0.1, True)


def test_errors_are_the_clients_own(client, pool):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    pool.failures = {2: PoolError("the replica died")}
    with pytest.raises(openai.APIError, match="the replica died"):
        list(client.completions.create(model="demo", prompt="a", stream=True))
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="demo", prompt="a")
    assert caught.value.status_code == 503
