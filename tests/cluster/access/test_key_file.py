"""The keys file on disk: read again when it changes, whatever state it is found in."""

import logging
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.key_file import KeyFile
from hybridserve.cluster.access.keys import KeyEntry

NOW = datetime.now(UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def owner(file: KeyFile, key: str) -> str | None:
    found = file.ring.find(key.encode(), datetime.now(UTC))
    return found.name if isinstance(found, KeyEntry) else None


def test_a_change_is_seen(path: Path) -> None:
    first = key_edit.add(path, "a", NOW)
    file = KeyFile(path)
    second = key_edit.add(path, "b", NOW)
    assert owner(file, second) is None
    file.check()
    assert (owner(file, first), owner(file, second)) == ("a", "b")
    key_edit.revoke(path, "a", NOW)
    file.check()
    assert (owner(file, first), owner(file, second)) == (None, "b")


def test_the_thread_sees_it_within_its_period(path: Path) -> None:
    key_edit.add(path, "a", NOW)
    file = KeyFile(path, poll_s=0.01)
    file.start()
    key = key_edit.add(path, "b", NOW)
    deadline = time.monotonic() + 10
    while owner(file, key) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    file.close()


@pytest.mark.parametrize("broken", ["", "keys:\n- {name: a}", "keys: [", "\xff", None])
def test_a_broken_file_leaves_the_keys_as_they_were(
    path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_edit.add(path, "a", NOW)
    good = path.read_bytes()
    file = KeyFile(path)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken, encoding="latin-1")
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            file.check()
    assert owner(file, key) == "a"
    [record] = caplog.records
    assert str(path) in record.getMessage() and "stay as they were" in record.getMessage()
    path.write_bytes(good.replace(b"name: a", b"name: z"))
    file.check()
    assert owner(file, key) == "z"


def test_taking_out_the_last_key_closes_the_server(path: Path) -> None:
    key = key_edit.add(path, "a", NOW)
    file = KeyFile(path)
    key_edit.revoke(path, "a", NOW)
    file.check()
    assert owner(file, key) is None


def test_a_change_within_the_clocks_grain_is_seen(path: Path) -> None:
    """Same size, same inode, same times: as of two writes between two ticks."""
    key = key_edit.add(path, "a", NOW)
    file = KeyFile(path)
    file.check()
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text(path.read_text().replace("name: a", "name: b"))
    os.utime(path, ns=times)
    file.check()
    assert owner(file, key) == "b"


def test_an_old_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key_edit.add(path, "a", NOW)
    os.utime(path, (1, 1))
    file = KeyFile(path)
    file.check()
    monkeypatch.setattr(Path, "open", lambda *args: pytest.fail("read again"))
    file.check()


@pytest.mark.parametrize("text", ["", "keys: []", "nonsense", None])
def test_a_start_needs_keys(path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="access.keys_file .*keys.yaml: "):
        KeyFile(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True), (0o620, True)])
def test_a_file_that_others_may_read_or_write(
    path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key_edit.add(path, "a", NOW)
    path.chmod(mode)
    KeyFile(path)
    assert [f"mode {mode:03o}" in record.getMessage() for record in caplog.records] == [True] * warns


def test_readers_never_see_half_a_change(path: Path) -> None:
    """One thread edits, the other reads: every reading is of a whole file."""
    key_edit.add(path, "a", NOW)
    key_edit.add(path, "b", NOW)
    file = KeyFile(path)
    done = threading.Event()

    def edit() -> None:
        for number in range(15):
            key_edit.add(path, f"n{number}", NOW)
            if number % 3 == 2:
                key_edit.revoke(path, f"n{number - 1}", NOW)
        done.set()

    editor = threading.Thread(target=edit)
    editor.start()
    while not done.is_set():
        file.check()
        assert file._last_error == ""
    editor.join()
    file.check()
    assert {entry.name for entry in file.ring.entries} >= {"a", "b", "n14"}
