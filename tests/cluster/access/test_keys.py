"""Keys, the text of their file, and who a presented key belongs to."""

import hashlib
import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridserve.cluster.access.key_text import KeysError, parse_keys
from hybridserve.cluster.access.keys import Expired, KeyEntry, Keyring, hash_key, new_key

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
HASHES = [hash_key(f"hs-{number}") for number in range(4)]


def file_of(*entries: str) -> str:
    return "keys:\n" + "".join(f"- {{name: a, {one}}}\n" for one in entries)


def test_a_new_key_is_found_by_its_hash() -> None:
    key = new_key()
    assert re.fullmatch(r"hs-[A-Za-z0-9_-]{43}", key)
    assert new_key() != key
    entry = KeyEntry(name="a", sha256=hashlib.sha256(key.encode()).hexdigest())
    ring = Keyring([entry])
    assert ring.find(key.encode(), NOW) is entry
    for other in (b"", key.encode()[:-1], key.encode() + b"x", b"x" * 100_000, new_key().encode()):
        assert ring.find(other, NOW) is None


def test_keys_whose_digests_begin_alike_are_told_apart() -> None:
    digest = hash_key("one")
    twin = digest[:16] + "0" * 48
    ring = Keyring([KeyEntry(name="twin", sha256=twin), KeyEntry(name="one", sha256=digest)])
    found = ring.find(b"one", NOW)
    assert isinstance(found, KeyEntry) and found.name == "one"
    assert Keyring([KeyEntry(name="twin", sha256=twin)]).find(b"one", NOW) is None


def test_a_key_ends_at_its_moment() -> None:
    entry = KeyEntry(name="a", sha256=hash_key("k"), expires=NOW)
    ring = Keyring([entry])
    assert ring.find(b"k", NOW - timedelta(microseconds=1)) is entry
    assert ring.find(b"k", NOW) == Expired(entry)


def test_a_whole_file() -> None:
    text = f"""
# who may
keys:
- name: team-a
  sha256: {HASHES[0]}
  created: 2026-11-01T00:00:00Z
  expires: 2026-12-31T23:59:59+01:00
  limits: {{requests_per_minute: 60, tokens_per_minute: 100000, max_concurrent: 8}}
  priority: low
- {{"name": "b", "sha256": "{HASHES[1]}"}}
"""
    first, second = parse_keys(text, NOW)
    assert first.expires == datetime(2026, 12, 31, 22, 59, 59, tzinfo=UTC)
    assert (first.limits.requests_per_minute, first.limits.tokens_per_minute) == (60, 100_000)
    assert (first.limits.max_concurrent, first.priority) == (8, "low")
    assert (second.expires, second.limits.max_concurrent, second.priority) == (None, None, "high")
    # JSON with its own indentation
    assert parse_keys(json.dumps({"keys": [{"name": "b", "sha256": HASHES[1]}]}, indent=4), NOW) == [second]
    assert parse_keys("keys: []", NOW) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("{}", "keys is missing"),
        ("- a", "line 1: a mapping with the one key 'keys' is expected"),
        ("keys: a", "line 1: keys must be a list"),
        ("\nusers: []", "line 2: unknown key 'users', only 'keys'"),
        ("keys:\n- a", "line 2: a key must be a mapping with name and sha256"),
        ("keys:\n- {name: a\n  b", ": not YAML"),
        (file_of(f"sha256: {HASHES[0]}, secret: x"), "line 2: unknown key secret"),
        (file_of("expires: 2027-01-01T00:00:00Z"), "line 2: sha256 is missing"),
        (file_of("sha256: hs-abc"), "line 2: sha256: String should match"),
        (file_of(f"sha256: {HASHES[0]}", f"sha256: {HASHES[0]}"), "line 3: the sha256 is that of line 2 too"),
        (file_of(f"sha256: {HASHES[0]}, expires: 2027-01-01T00:00:00"), "timezone info, got '2027-01-01T00:"),
        (file_of(f"sha256: {HASHES[0]}, expires: 1900000000"), "line 2: expires must be an ISO date-time"),
        (file_of(f"sha256: {HASHES[0]}, expires: soon"), "line 2: expires: "),
        (
            file_of(f"sha256: {HASHES[0]}, limits: {{max_concurrent: 0}}"),
            "limits.max_concurrent: Input should be",
        ),
        (file_of(f"sha256: {HASHES[0]}, priority: top"), "line 2: priority: Input should be 'high'"),
        (
            file_of(f"sha256: {HASHES[0]}, expires: 2020-01-01T00:00:00Z, expires: 2030-01-01T00:00:00Z"),
            "line 2: expires is given twice",
        ),
        (file_of(*(f"sha256: {one}" for one in HASHES[:3])), "line 4: name a has 3 live keys, at most 2"),
        (
            file_of(f"sha256: {HASHES[0]}", f"sha256: {HASHES[1]}, priority: low"),
            "line 3: name a has other limits or priority than in line 2",
        ),
        ("keys: " + "[" * 5000, "nest"),
        ("keys:\n- {name: a, b: " + "[" * 900 + "]" * 900 + "}", "nest"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, reason: str) -> None:
    with pytest.raises(KeysError, match=re.escape(reason)):
        parse_keys(text, NOW)


def test_a_key_pasted_in_the_place_of_its_hash_is_not_repeated() -> None:
    key = new_key()
    with pytest.raises(KeysError) as told:
        parse_keys(file_of(f"sha256: {key}"), NOW)
    assert key not in str(told.value)


def test_expired_keys_do_not_count() -> None:
    old = [f"sha256: {one}, expires: 2026-11-29T12:00:00Z, priority: low" for one in HASHES[:2]]
    text = file_of(*old, f"sha256: {HASHES[2]}", f"sha256: {HASHES[3]}")
    assert len(parse_keys(text, NOW)) == 4
    with pytest.raises(KeysError, match="other limits"):
        parse_keys(text, NOW - timedelta(seconds=1))


_PIECES = (
    "keys",
    ":",
    "\n",
    "- ",
    "name: a",
    "{",
    "}",
    "[",
    "]",
    '"',
    "&x ",
    "*x",
    "!!int ",
    "<<: ",
    "? ",
    "\x00",
    "é",
)


@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(_PIECES)).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert isinstance(parse_keys(text, NOW), list)
    except KeysError as error:
        assert str(error)
