"""Changes to a keys file: one at a time, and whole or not at all, whoever reads it meanwhile.

A server may read at any moment, so the new content is written beside the file and takes its name; two who
edit at once wait for each other at a lock file beside it, as the file itself is another after each change.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import yaml

from hybridserve.cluster.access.key_text import KeysError, parse_keys
from hybridserve.cluster.access.keys import MAX_LIVE_KEYS, KeyEntry, KeyLimits, hash_key, new_key

_HEADER = "# API keys of hybridserve, by hash; changed by `hybridserve keys`\n"


def load(path: Path) -> list[KeyEntry]:
    """The file's entries. Raises ValueError naming the file, or OSError."""
    try:
        return parse_keys(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def add(
    path: Path,
    name: str,
    now: datetime,
    *,
    expires: datetime | None = None,
    limits: KeyLimits | None = None,
    priority: str = "high",
) -> str:
    """A key for a new name; the file is made when it is not there. Returns the key, which is kept nowhere.

    Raises:
        ValueError: the name has a live key, or a value is out of its bounds.
    """
    key = new_key()
    entry = _entry(
        name=name,
        sha256=hash_key(key),
        created=now,
        expires=expires,
        limits=limits or KeyLimits(),
        priority=priority,
    )
    if expires is not None and expires <= now:
        raise ValueError(f"expires must be in the future, got {expires.isoformat()}")

    def change(entries: list[KeyEntry]) -> list[KeyEntry]:
        if _live(entries, name, now):
            raise ValueError(f"{path}: name {name} has a key; `hybridserve keys rotate` makes a second")
        return [*entries, entry]

    _change(path, change, now, may_create=True)
    return key


def rotate(path: Path, name: str, now: datetime, *, grace: timedelta, expires: datetime | None = None) -> str:
    """A second key for a name, with the first one's limits; the first ends after `grace`. Returns it.

    expires: by default the new key lives as long as the old one was made for.

    Raises:
        ValueError: the name has no live key, or two.
    """
    key = new_key()

    def change(entries: list[KeyEntry]) -> list[KeyEntry]:
        live = _live(entries, name, now)
        if not live:
            raise ValueError(f"{path}: name {name} has no live key; `hybridserve keys add` makes one")
        if len(live) >= MAX_LIVE_KEYS:
            ids = ", ".join(one.key_id for one in live)
            raise ValueError(
                f"{path}: name {name} has {len(live)} live keys ({ids}); revoke the old one first, or wait "
                "until it has expired"
            )
        [old] = live
        end = now + grace if old.expires is None else min(old.expires, now + grace)
        end_of_new = expires
        if end_of_new is None and old.expires is not None and old.created is not None:
            end_of_new = now + (old.expires - old.created)
        fresh = {"sha256": hash_key(key), "created": now, "expires": end_of_new}
        kept = [
            one.model_copy(update={"expires": end}) if one is old else one
            for one in entries
            # what a former rotation left behind
            if one.name != name or one.is_live(now)
        ]
        return [*kept, _entry(**{**dict(old), **fresh})]

    _change(path, change, now)
    return key


def revoke(path: Path, name: str, now: datetime, *, key_id: str | None = None) -> list[KeyEntry]:
    """Take a name's keys out of the file, or the one whose id that is. Returns what was taken out.

    Raises:
        ValueError: there is none.
    """
    gone: list[KeyEntry] = []

    def change(entries: list[KeyEntry]) -> list[KeyEntry]:
        for one in entries:
            if one.name == name and (key_id is None or one.key_id == key_id):
                gone.append(one)
        if not gone:
            which = "" if key_id is None else f" with id {key_id}"
            raise ValueError(f"{path}: name {name} has no key{which}")
        return [one for one in entries if one not in gone]

    _change(path, change, now)
    return gone


def _entry(**fields: object) -> KeyEntry:
    """Checked with the words of the file's own errors."""
    text = _dump([KeyEntry.model_construct(**fields)])
    try:
        return parse_keys(text)[0]
    except KeysError as error:
        raise ValueError(str(error).partition(": ")[2]) from None


def _live(entries: list[KeyEntry], name: str, now: datetime) -> list[KeyEntry]:
    return [one for one in entries if one.name == name and one.is_live(now)]


def _change(
    path: Path,
    change: Callable[[list[KeyEntry]], list[KeyEntry]],
    now: datetime,
    *,
    may_create: bool = False,
) -> None:
    # the file that a link names is changed, not the link
    path = path.resolve()
    with _locked(path):
        header, entries = _HEADER, []
        if path.exists() or not may_create:
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines(keepends=True)
            header = "".join(lines[: _leading_comments(lines)])
            try:
                entries = parse_keys(text, now)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
        text = header + _dump(change(entries))
        # what a server would refuse is not written
        parse_keys(text, now)
        _replace(path, text)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _replace(path: Path, text: str) -> None:
    """Give `path` a new content: readable for its owner alone, or as it was."""
    mode = path.stat().st_mode & 0o640 if path.exists() else 0o600
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(fd, mode)
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _leading_comments(lines: list[str]) -> int:
    for index, line in enumerate(lines):
        if line.strip() and not line.lstrip().startswith("#"):
            return index
    return len(lines)


def _dump(entries: list[KeyEntry]) -> str:
    keys = []
    for one in entries:
        fields: dict[str, object] = {"name": one.name, "sha256": one.sha256}
        for name in ("created", "expires"):
            if (moment := getattr(one, name)) is not None:
                fields[name] = moment.isoformat(timespec="seconds")
        if limits := one.limits.model_dump(exclude_none=True):
            fields["limits"] = limits
        if one.priority != "high":
            fields["priority"] = one.priority
        keys.append(fields)
    # JSON is YAML, and a file that was JSON becomes YAML: both are read the same way
    return yaml.safe_dump({"keys": keys}, sort_keys=False, allow_unicode=True)
