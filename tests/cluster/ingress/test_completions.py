"""/v1/completions and /generate, whole answers: text, token counts, choices, log-probabilities."""

import pytest

PATH = "/v1/completions"


def complete(caller, **fields):
    response = caller.post(PATH, {"model": "demo", "prompt": "def f", "max_tokens": 64, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_answer(caller, pool, tokenizer):
    pool.text = " hello 🙂"
    answer = complete(caller)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == "demo"
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert choice["text"] == " hello 🙂"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"] is None
    prompt, made = len(tokenizer.encode("def f")), len(tokenizer.encode(pool.text)) + 1
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


def test_what_the_pool_is_asked(caller, pool, tokenizer):
    complete(caller, temperature=0.5, top_k=9, seed=3, stop="x", stop_token_ids=[7], logit_bias={"5": -1})
    (request,) = pool.submitted
    params = request.params
    assert request.prompt_token_ids == tuple(tokenizer.encode("def f"))
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 9, 3, 64)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (7,), {5: -1})


def test_defaults_are_the_checkpoints_where_the_client_is_silent(make_caller, pool):
    caller = make_caller(defaults={"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 20, "do_sample": True})
    caller.post(PATH, {"prompt": "a"})
    caller.post(PATH, {"prompt": "a", "temperature": 0, "top_p": None})
    caller.post("/generate", {"prompt": "a"})
    chosen = [(r.params.temperature, r.params.top_p, r.params.max_tokens) for r in pool.submitted]
    assert chosen == [(0.7, 0.9, 16), (0, 0.9, 16), (0.7, 0.9, 20)]


def test_defaults_out_of_bounds_are_refused_at_start(make_caller):
    with pytest.raises(ValueError, match="generation_config.json: temperature .* -3"):
        make_caller(defaults={"temperature": -3})


def test_silence_about_max_tokens_never_exceeds_the_context(caller, pool):
    response = caller.post(PATH, {"prompt": [5] * 250})
    assert response.status_code == 200
    assert pool.submitted[0].params.max_tokens == 6


def test_a_top_k_beyond_the_vocabulary_is_all_of_it(caller, pool):
    complete(caller, top_k=10**30)
    assert pool.submitted[0].params.top_k == 0


def test_length(caller, pool, tokenizer):
    pool.text = "a long answer that does not fit"
    answer = complete(caller, max_tokens=3)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"] == tokenizer.decode(tokenizer.encode(pool.text)[:3])
    assert answer["usage"]["completion_tokens"] == 3


def test_a_character_cut_by_the_length_is_shown_as_broken(caller, pool, tokenizer):
    pool.text = "🙂"
    assert len(tokenizer.encode(pool.text)) > 1
    assert complete(caller, max_tokens=1)["choices"][0]["text"] == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("prompt", ["one", ["one"], [5, 6], [[5, 6]], ["one", "two"], [[5], [6, 7]]])
@pytest.mark.parametrize("n", [1, 3])
def test_every_prompt_gets_n_answers_in_order(caller, pool, prompt, n):
    answer = complete(caller, prompt=prompt, n=n, seed=10)
    count = n * (len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    assert [choice["index"] for choice in answer["choices"]] == list(range(count))
    by_index = {int(r.request_id.rsplit("-", 1)[1]): r for r in pool.submitted}
    assert len(by_index) == count
    for index, choice in enumerate(answer["choices"]):
        request = by_index[index]
        assert request.params.n == 1
        assert request.params.seed == 10 + index % n
        assert choice["text"] == pool.tokenizer.decode(pool.answer(request))
    prompts = {r.prompt_token_ids for r in pool.submitted}
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_the_last_seed_of_all_goes_round(caller, pool):
    complete(caller, n=2, seed=2**64 - 1)
    assert sorted(r.params.seed for r in pool.submitted) == [0, 2**64 - 1]


@pytest.mark.parametrize("tokens_per_news", [1, 2, 100])
def test_stop_strings(caller, pool, tokenizer, tokens_per_news):
    pool.text = "alpha beta gamma delta epsilon"
    pool.tokens_per_news = tokens_per_news
    answer = complete(caller, stop=["mma de", "zzz"])
    (choice,) = answer["choices"]
    assert choice["text"] == "alpha beta ga"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "mma de")
    # up to and with the token that completed it
    counted = answer["usage"]["completion_tokens"]
    ids = tokenizer.encode(pool.text)
    assert "mma de" in tokenizer.decode(ids[:counted])
    assert "mma de" not in tokenizer.decode(ids[: counted - 1])
    assert len(pool.ended) == 1
    if tokens_per_news == 1:
        assert pool.sent == counted


def test_stop_string_included(caller, pool):
    pool.text = "alpha beta gamma"
    choice = complete(caller, stop="beta", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "alpha beta"


def test_the_end_token_shows_only_when_asked(caller, pool):
    pool.text = "x"
    assert complete(caller, skip_special_tokens=False)["choices"][0]["text"] == "x"
    shown = complete(caller, skip_special_tokens=False, include_stop_str_in_output=True)
    assert shown["choices"][0]["text"] == "x<|im_end|>"


def test_logprobs(caller, pool, tokenizer):
    pool.text = " né 🙂 x"
    choice = complete(caller, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    ids = [*tokenizer.encode(pool.text), 2]
    assert logprobs["tokens"] == [tokenizer.token_text(i) for i in ids]
    assert logprobs["token_logprobs"] == [-1.5] * len(ids)
    first = logprobs["top_logprobs"][0]
    assert first[tokenizer.token_text(ids[0] + 1)] == -0.25
    assert first[tokenizer.token_text(ids[0])] == -1.5
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)
    assert logprobs["text_offset"][-1] == len(choice["text"])


def test_logprobs_zero_shows_the_chosen_token_alone(caller, pool):
    pool.text = "x"
    logprobs = complete(caller, logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"][0] == {"x": -1.5}


def test_an_impossible_token_has_a_finite_logprob(caller, pool):
    pool.text = "x"
    top = complete(caller, logprobs=3)["choices"][0]["logprobs"]["top_logprobs"][0]
    assert min(top.values()) == -9999.0


def test_echo(caller, pool):
    pool.text = " answer"
    assert complete(caller, echo=True)["choices"][0]["text"] == "def f answer"


def test_echo_of_token_ids(caller, pool, tokenizer):
    pool.text = " answer"
    ids = tokenizer.encode("def g")
    assert complete(caller, prompt=ids, echo=True)["choices"][0]["text"] == "def g answer"


def test_echo_with_logprobs_begins_with_the_prompts(caller, pool, tokenizer):
    pool.text = " answer"
    choice = complete(caller, echo=True, logprobs=1, n=2)["choices"][1]
    prompt = tokenizer.encode("def f")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][: len(prompt)] == [tokenizer.token_text(i) for i in prompt]
    assert logprobs["token_logprobs"][: len(prompt)] == [None] + [-1.5] * (len(prompt) - 1)
    assert logprobs["text_offset"][len(prompt)] == len("def f")
    assert {len(column) for column in logprobs.values()} == {
        len(prompt) + len(tokenizer.encode(" answer")) + 1
    }


def test_prompt_logprobs(caller, tokenizer):
    prompt = tokenizer.encode("def f")
    entries = complete(caller, prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(prompt)
    chosen = entries[1][str(prompt[1])]
    assert chosen == {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(prompt[1])}


def test_generate(caller, pool, tokenizer):
    pool.text = " short"
    answer = caller.post("/generate", {"prompt": "def f", "max_tokens": 9, "temperature": 0}).json()
    prompt, made = len(tokenizer.encode("def f")), len(tokenizer.encode(" short")) + 1
    assert answer == {
        "text": " short",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made},
    }


def test_a_long_prompt_is_tokenised_to_the_same_ids(make_caller, pool, tokenizer):
    text = "x = 1\n" * 20
    for caller in (make_caller(inline_encode_characters=5), make_caller()):
        assert caller.post(PATH, {"prompt": text}).status_code == 200
    threaded, inline = (request.prompt_token_ids for request in pool.submitted)
    assert threaded == inline == tuple(tokenizer.encode(text))
