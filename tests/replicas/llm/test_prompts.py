import numpy as np
import pytest

from hybridserve.replicas.prompts import as_prompt_list, tokenize_prompt
from hybridserve.replicas.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        ([[1], []], [[1], []]),
        ([], []),
    ],
)
def test_one_prompt_or_many(prompts: object, expected: list[object]) -> None:
    assert as_prompt_list(prompts) == expected


def test_every_form_gives_the_same_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def f(")
    forms = ["def f(", ids, {"prompt": "def f("}, {"prompt_token_ids": ids}, list(np.array(ids))]
    assert [tokenize_prompt(form, tokenizer).token_ids for form in forms] == [ids] * 5
    assert [tokenize_prompt(form, tokenizer).text for form in forms[:3]] == ["def f(", None, "def f("]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "got int"),
        ([1, "a"], "prompt token 1 must be an integer, got 'a'"),
        ([1, True], "prompt token 1 must be an integer, got True"),
        ([1, 2.0], "got 2.0"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "one key"),
        ({"text": "a"}, "got \\['text'\\]"),
        ({"prompt": [1]}, "prompt must be a string, got list"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list of integers, got str"),
        ("\ud800", "lone surrogate"),
    ],
)
def test_other_forms_are_refused(tokenizer: Tokenizer, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tokenize_prompt(prompt, tokenizer)


def test_what_is_no_list_is_refused() -> None:
    with pytest.raises(ValueError, match="got int"):
        as_prompt_list(3)
