"""Whatever JSON comes in, the answer is a success or a well-formed 4xx, never a 5xx."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2, 2**31, 2**63, 2**64, 10**40, 0.5, 1e-320, 1e308])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "system", "assistant", "text", "demo", "\ud800", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)
FIELDS = [
    "model",
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "suffix",
    "user",
    "skip_special_tokens",
    "tools",
    "tool_choice",
    "response_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "tokens",
]
BASES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/generate": {"prompt": "a", "max_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def check(response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", list(BASES))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3), bare=st.booleans())
def test_random_fields(caller, path, changes, bare):
    check(caller.post(path, changes if bare else {**BASES[path], **changes}))


@pytest.mark.parametrize("path", list(BASES))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_random_bodies(caller, path, content):
    check(caller.request("POST", path, content=content))
