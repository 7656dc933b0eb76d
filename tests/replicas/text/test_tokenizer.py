import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hybridserve.replicas.text.tokenizer import Tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


def test_ids_are_those_of_transformers(byte_level: Tokenizer, demo_model: Path) -> None:
    reference = AutoTokenizer.from_pretrained(demo_model)
    text = "def f(x):\n    return 'äöü 中文 😀' # <|im_end|> done\n\n\n\tx  y"
    assert byte_level.encode(text) == reference.encode(text)
    ids = list(range(0, 8192, 7))
    assert byte_level.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(text=TEXT)
def test_decode_inverts_encode(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text


@given(text=TEXT)
def test_token_bytes_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    assert b"".join(map(byte_level.token_bytes, byte_level.encode(text))) == text.encode()


def test_token_text_writes_parts_of_a_character_as_bytes(
    byte_level: Tokenizer, prefix_space: Tokenizer
) -> None:
    assert [byte_level.token_text(i) for i in byte_level.encode("€")] == [
        r"bytes:\xe2",
        r"bytes:\x82",
        r"bytes:\xac",
    ]
    assert byte_level.token_text(2) == "<|im_end|>"
    assert byte_level.token_text(8192) == ""
    assert [prefix_space.token_text(i) for i in prefix_space.encode("ab ß")] == [
        " ab",
        " ",
        r"bytes:\xc3",
        r"bytes:\x9f",
    ]


def test_vocabulary_and_end_token(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 8192
    assert byte_level.eos_token_ids == (2,)
    assert byte_level.is_special(0)
    assert not byte_level.is_special(3)


def test_skip_special_tokens(byte_level: Tokenizer) -> None:
    ids = [1, *byte_level.encode("hi"), 2]
    assert byte_level.decode(ids) == "hi"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="lone surrogate at character 2"):
        byte_level.encode("ab\ud800")


def test_padding_and_truncation_of_the_file_are_not_applied(demo_model: Path, tmp_path: Path) -> None:
    data = json.loads((demo_model / "tokenizer.json").read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert len(Tokenizer.load(tmp_path).encode("one two three four five six seven")) > 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "must hold an object, got list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "it has rag"),
        ("tokenizer_config.json", '{"chat_template": 3}', "must be a string or a list, got int"),
        ("chat_template.jinja", "{% if %}", "cannot be compiled"),
    ],
)
def test_a_broken_folder_is_named(
    demo_model: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    shutil.copy(demo_model / "tokenizer.json", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(tmp_path)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ValueError, match="'/nowhere/at/all' does not exist"):
        Tokenizer.load("/nowhere/at/all")


def test_importing_and_loading_need_no_torch(demo_model: Path) -> None:
    code = f"""
import sys
from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.detokenizer import IncrementalDetokenizer
from hybridserve.replicas.text.tokenizer import Tokenizer
tokenizer = Tokenizer.load({str(demo_model)!r})
ids = tokenizer.encode_chat([{{"role": "user", "content": "hi"}}])
IncrementalDetokenizer(tokenizer, ids, SamplingParams()).push([5])
assert ids and not {{"torch", "transformers", "ray"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_encode_releases_the_interpreter_lock(byte_level: Tokenizer) -> None:
    text = "some words of no great interest, 123 + 456 = 579\n" * 40_000
    done = threading.Event()

    def encode() -> None:
        byte_level.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    start = time.perf_counter()
    thread.start()
    ticks = 0
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    # were the lock held throughout, this thread would get one or two turns
    assert ticks > 20, f"{ticks} turns in {time.perf_counter() - start:.2f} s"
