from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.replicas.sampling_params import SamplingParams
from hybridserve.replicas.text.detokenizer import IncrementalDetokenizer
from hybridserve.replicas.text.tokenizer import Tokenizer

CHARACTERS = st.one_of(
    st.characters(exclude_categories=["Cs"]), st.sampled_from("aé中😀\N{ZERO WIDTH JOINER} ")
)
TEXT = st.text(CHARACTERS, max_size=40)
# half of them single bytes, so that broken characters are common; some beyond the vocabulary, as a padded
# model can draw them
IDS = st.lists(st.one_of(st.integers(3, 258), st.integers(0, 8300)), max_size=40)
CUTS = st.lists(st.integers(0, 5), max_size=40)


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    """`ids` in pieces of the sizes `cuts` (some empty), the rest as one piece."""
    pieces, start = [], 0
    for size in cuts:
        pieces.append(list(ids[start : start + size]))
        start += size
    return [*pieces, list(ids[start:])]


def deltas(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    params: SamplingParams | None = None,
    prompt: Sequence[int] = (),
) -> tuple[list[str], IncrementalDetokenizer]:
    """What a detokenizer shows when `ids` come in pieces, its last entry being the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params or SamplingParams())
    shown = [detokenizer.push(piece) for piece in chunks(ids, cuts)]
    return [*shown, detokenizer.finish()], detokenizer


@given(text=TEXT, cuts=CUTS)
def test_text_comes_back_whatever_the_chunks(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    params = SamplingParams(skip_special_tokens=False)
    shown, _ = deltas(byte_level, byte_level.encode(text), cuts, params)
    assert "".join(shown) == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in d for d in shown)


@given(ids=IDS, cuts=CUTS, skip=st.booleans())
def test_any_ids_give_what_decoding_at_once_gives(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    shown, detokenizer = deltas(byte_level, ids, cuts, SamplingParams(skip_special_tokens=skip))
    assert "".join(shown) == byte_level.decode(ids, skip_special_tokens=skip)
    assert detokenizer.num_tokens == len(ids)


@given(text=TEXT)
def test_every_character_is_shown_with_its_last_token(byte_level: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, (), SamplingParams(skip_special_tokens=False))
    data, shown = b"", ""
    for token_id in byte_level.encode(text):
        data += byte_level.token_bytes(token_id)
        shown += detokenizer.push([token_id])
        assert shown == data.decode(errors="ignore")


def test_the_prompt_is_no_part_of_the_text(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a prompt")
    shown, _ = deltas(byte_level, byte_level.encode(" and more"), prompt=ids)
    assert "".join(shown) == " and more"


@given(text=st.text("abcé中😀ß ", max_size=30), cuts=CUTS)
def test_prefix_space_text_comes_back(prefix_space: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = prefix_space.encode(text)
    shown, _ = deltas(prefix_space, ids, cuts)
    assert "".join(shown) == prefix_space.decode(ids)


@given(prompt=st.text("abcé中😀ß ", min_size=1, max_size=10), text=st.text("abcé中😀ß ", max_size=20))
def test_prefix_space_is_kept_after_a_prompt(prefix_space: Tokenizer, prompt: str, text: str) -> None:
    before = prefix_space.encode(prompt)
    after = prefix_space.encode(text)
    shown, _ = deltas(prefix_space, after, prompt=before)
    whole = prefix_space.decode([*before, *after])
    assert prefix_space.decode(before) + "".join(shown) == whole


@given(ids=st.lists(st.integers(0, 290), max_size=30), cuts=CUTS)
def test_prefix_space_any_ids_do_not_depend_on_chunks(
    prefix_space: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    assert "".join(deltas(prefix_space, ids, cuts)[0]) == "".join(deltas(prefix_space, ids)[0])


def expected_with_stops(
    tokenizer: Tokenizer, ids: list[int], params: SamplingParams
) -> tuple[str, int, str | None]:
    """Text, tokens used and stop string, by looking at all the text again after every token."""
    for count in range(1, len(ids) + 1):
        data = b"".join(tokenizer.token_bytes(i) for i in ids[:count])
        text = data.decode(errors="ignore")
        found = [(at, i) for i, stop in enumerate(params.stop) if (at := text.find(stop)) >= 0]
        if not found:
            continue
        at, i = min(found)
        stop = params.stop[i]
        return text[: at + len(stop)] if params.include_stop_str_in_output else text[:at], count, stop
    return tokenizer.decode(ids, skip_special_tokens=False), len(ids), None


@given(
    text=st.text("ab\né", max_size=40),
    stops=st.lists(st.text("ab\né", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=CUTS,
    include=st.booleans(),
)
def test_stop_strings(
    byte_level: Tokenizer, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    ids = byte_level.encode(text)
    params = SamplingParams(
        max_tokens=None, stop=tuple(stops), include_stop_str_in_output=include, skip_special_tokens=False
    )
    shown, detokenizer = deltas(byte_level, ids, cuts, params)
    assert ("".join(shown), detokenizer.num_tokens, detokenizer.stopped) == expected_with_stops(
        byte_level, ids, params
    )


def test_nothing_shown_is_taken_back(byte_level: Tokenizer) -> None:
    ids = [i for character in "one EN two END three" for i in byte_level.encode(character)]
    detokenizer = IncrementalDetokenizer(byte_level, (), SamplingParams(stop="END"))
    shown = [detokenizer.push([i]) for i in ids]
    assert shown[4:8] == ["", "", "EN ", "t"]
    assert "".join(shown) == "one EN two "
    assert detokenizer.stopped == "END"
    assert detokenizer.num_tokens == len("one EN two END")
    assert detokenizer.finish() == ""


def test_held_back_text_comes_with_the_flush(byte_level: Tokenizer) -> None:
    shown, detokenizer = deltas(byte_level, byte_level.encode("ab EN"), params=SamplingParams(stop="END"))
    assert shown == ["ab ", "EN"]
    assert detokenizer.stopped is None


@pytest.mark.parametrize(
    ("stop", "text", "stopped"),
    [
        (("b", "abc"), "x", "abc"),
        (("ab", "abc"), "x", "ab"),
        (("abc", "ab"), "x", "abc"),
        (("zz", "cd"), "xab", "cd"),
    ],
)
def test_earliest_start_wins_then_the_first_listed(
    prefix_space: Tokenizer, byte_level: Tokenizer, stop: tuple[str, ...], text: str, stopped: str
) -> None:
    # one id whose text completes several stop strings at once
    whole = next(i for i in range(8192) if byte_level.token_text(i) == "abc")
    ids = [*byte_level.encode("x"), whole, *byte_level.encode("d")]
    shown, detokenizer = deltas(byte_level, ids, params=SamplingParams(stop=stop))
    assert "".join(shown) == text
    assert detokenizer.stopped == stopped


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaa"), (6, "aaaaa")]
)
def test_min_tokens_delays_stop_strings(byte_level: Tokenizer, min_tokens: int, text: str) -> None:
    (a,) = byte_level.encode("a")
    params = SamplingParams(stop="aa", min_tokens=min_tokens, max_tokens=None)
    shown, detokenizer = deltas(byte_level, [a] * 5, params=params)
    assert "".join(shown) == text
    assert detokenizer.num_tokens == {0: 2, 1: 2, 2: 3}.get(min_tokens, min(min_tokens + 1, 5))
