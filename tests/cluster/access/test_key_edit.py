"""Adding, rotating and revoking keys, by hand and by the command line."""

import os
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridserve.cluster.access import key_edit
from hybridserve.cluster.access.keys import KeyLimits, hash_key
from hybridserve.cluster.cli.main import app

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def test_rotation_from_the_first_key_to_the_third(path: Path) -> None:
    limits = KeyLimits(requests_per_minute=5)
    first = key_edit.add(path, "a", NOW, expires=NOW + 90 * DAY, limits=limits, priority="normal")
    second = key_edit.rotate(path, "a", NOW + DAY, grace=7 * DAY)
    old, new = key_edit.load(path)
    assert (old.sha256, old.expires) == (hash_key(first), NOW + 8 * DAY)
    assert (new.sha256, new.created, new.expires) == (hash_key(second), NOW + DAY, NOW + 91 * DAY)
    assert (new.limits, new.priority) == (limits, "normal")
    with pytest.raises(ValueError, match=f"name a has 2 live keys .{old.key_id}, {new.key_id}"):
        key_edit.rotate(path, "a", NOW + 2 * DAY, grace=DAY)
    third = key_edit.rotate(path, "a", NOW + 8 * DAY, grace=DAY, expires=NOW + 20 * DAY)
    # the first has ended, and goes
    assert [one.sha256 for one in key_edit.load(path)] == [hash_key(second), hash_key(third)]
    assert [one.expires for one in key_edit.load(path)] == [NOW + 9 * DAY, NOW + 20 * DAY]


def test_a_grace_period_lengthens_no_life(path: Path) -> None:
    key_edit.add(path, "a", NOW, expires=NOW + DAY)
    key_edit.rotate(path, "a", NOW, grace=7 * DAY)
    assert key_edit.load(path)[0].expires == NOW + DAY


def test_what_cannot_be_done(path: Path) -> None:
    with pytest.raises(OSError, match=str(path)):
        key_edit.rotate(path, "a", NOW, grace=DAY)
    assert not path.exists()
    key_edit.add(path, "a", NOW)
    before = path.read_bytes()
    for action, message in (
        (lambda: key_edit.add(path, "a", NOW), "name a has a key"),
        (lambda: key_edit.add(path, "b c", NOW), "name: String should match"),
        (lambda: key_edit.add(path, "b", NOW, expires=NOW), "expires must be in the future"),
        (lambda: key_edit.add(path, "b", NOW, priority="top"), "priority: Input should be"),
        (lambda: key_edit.rotate(path, "b", NOW, grace=DAY), "name b has no live key"),
        (lambda: key_edit.revoke(path, "b", NOW), "name b has no key"),
        (lambda: key_edit.revoke(path, "a", NOW, key_id="00000000"), "no key with id 00000000"),
    ):
        with pytest.raises(ValueError, match=message):
            action()
    assert path.read_bytes() == before
    path.write_text("keys:\n- nonsense\n")
    with pytest.raises(ValueError, match="keys.yaml: line 2"):
        key_edit.add(path, "b", NOW)
    assert path.read_text() == "keys:\n- nonsense\n"


def test_one_of_two_keys_is_revoked_by_its_id(path: Path) -> None:
    key_edit.add(path, "a", NOW)
    second = key_edit.rotate(path, "a", NOW, grace=DAY)
    [gone] = key_edit.revoke(path, "a", NOW, key_id=key_edit.load(path)[0].key_id)
    assert gone.name == "a"
    assert [one.sha256 for one in key_edit.load(path)] == [hash_key(second)]


def test_the_files_mode_and_first_comments_stay(path: Path, tmp_path: Path) -> None:
    key_edit.add(path, "a", NOW)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("# ours\n\n# ask ops\n" + path.read_text().partition("\n")[2])
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    key_edit.add(link, "b", NOW)
    assert path.read_text().startswith("# ours\n\n# ask ops\nkeys:\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["keys.yaml", "keys.yaml.lock", "link.yaml"]


def test_two_who_edit_at_once_lose_nothing(path: Path) -> None:
    def add(first: int) -> None:
        for number in range(first, first + 4):
            key_edit.add(path, f"n{number}", NOW)

    threads = [threading.Thread(target=add, args=(100 * one,)) for one in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(key_edit.load(path)) == 16


def test_the_command_line(path: Path) -> None:
    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["keys", arguments[0], str(path), *arguments[1:]])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    key = run("add", "team", "--expires-in", "90d", "--max-concurrent", "3", "--priority", "low").strip()
    assert key.startswith("hs-")
    [entry] = key_edit.load(path)
    assert (entry.sha256, entry.limits.max_concurrent, entry.priority) == (hash_key(key), 3, "low")
    assert entry.expires - entry.created == 90 * DAY
    assert key not in path.read_text()
    new = run("rotate", "team", "--grace", "12h").strip()
    listed = run("list")
    assert all(one.key_id in listed for one in key_edit.load(path))
    assert "3 at once" in listed and "live" in listed
    assert key not in listed and new not in listed
    assert run("revoke", "team", "--id", entry.key_id) == f"revoked team {entry.key_id}\n"
    assert [one.sha256 for one in key_edit.load(path)] == [hash_key(new)]
    with pytest.raises(ValueError, match="--expires-in must be a number of days.*'9x'"):
        run("add", "b", "--expires-in", "9x")
    with pytest.raises(ValueError, match="'0d'"):
        run("rotate", "team", "--grace", "0d")
