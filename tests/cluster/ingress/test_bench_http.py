"""What bench_http.py has of its own: many streams at once, and a tokenizer for shapes that have none."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridserve.replicas.text.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def benchmarks(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts can be imported."""
    monkeypatch.syspath_prepend(str(repo_root / "tests" / "benchmarks"))


def test_a_crowd_begins_at_once_and_counts_every_token(serve: Callable[..., int], pool) -> None:
    from serve.client import Target
    from serve.crowd import Crowd

    pool.text = " a b c d e f g h"
    pool.step_seconds = 0.002
    prompts = [[10 + index] * (3 + index) for index in range(40)]
    with Crowd(Target(f"http://127.0.0.1:{serve()}", "demo"), len(prompts)) as crowd:
        found = crowd.send(prompts, 4)
        assert found.tokens == 160 and len(found.first_token_s) == 40
        assert 0 < min(found.first_token_s) <= max(found.first_token_s) <= found.seconds
        assert 1 <= found.tokens_per_event <= 4
        assert sorted(len(one.prompt_token_ids) for one in pool.submitted) == list(range(3, 43))
        assert {one.params.max_tokens for one in pool.submitted} == {4}
        pool.engine_error_at = 2
        with pytest.raises(RuntimeError, match="of 4 tokens ended with 'error event engine_error'"):
            crowd.send(prompts[:2], 4)


def test_a_made_tokenizer_has_a_text_for_every_id(tmp_path: Path) -> None:
    from make_tokenizer import make_tokenizer

    make_tokenizer(tmp_path, 1500)
    made = Tokenizer.load(tmp_path)
    assert made.vocab_size == 1500 and made.byte_level
    assert made.decode(made.encode("def f(x):\n    é")) == "def f(x):\n    é"
    assert len(made.encode("def f(x):")) == 9
    texts = [made.token_bytes(index) for index in range(1500)]
    assert len(set(texts)) == 1500 and all(texts)
    assert made.decode([300, 1499]).isprintable() and len(made.decode([300, 1499]).split()) == 2
    with pytest.raises(ValueError, match="vocab_size must be at least 256, got 9"):
        make_tokenizer(tmp_path, 9)
