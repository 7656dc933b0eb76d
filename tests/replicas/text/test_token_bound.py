"""The bound is below the truth, and near enough to be of use."""

import time

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from hybridserve.replicas.text.token_bound import TokenBound
from hybridserve.replicas.text.tokenizer import Tokenizer


@given(text=st.text(max_size=300) | st.text(alphabet=" \n\tab1=-é\u0301한", max_size=300))
def test_never_more_than_there_are(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.min_tokens(text) <= len(byte_level.encode(text, add_special_tokens=False))


def test_runs_that_the_longest_tokens_are_made_of(byte_level: Tokenizer) -> None:
    longest = sorted((byte_level.token_bytes(i) for i in range(byte_level.vocab_size)), key=len)[-20:]
    for token in longest:
        text = token.decode(errors="ignore") * 50
        assert byte_level.min_tokens(text) <= len(byte_level.encode(text, add_special_tokens=False))


def test_megabytes_of_prose_and_of_digits_are_known_to_be_too_many_at_once(byte_level: Tokenizer) -> None:
    prose = "The quick brown fox jumps over the lazy dog. " * 150_000
    began = time.thread_time()
    assert byte_level.min_tokens(prose) > 100_000
    assert byte_level.min_tokens("0123456789" * 700_000) > 100_000
    assert time.thread_time() - began < 2.0


def test_nothing_is_said_of_a_tokenizer_that_may_drop_text() -> None:
    from tokenizers import models, pre_tokenizers

    words = FastTokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBound(words, [b"a"]).at_least("x " * 1000) == 0
