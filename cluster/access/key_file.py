"""The keys file on disk: read, and read again when it has changed, on a thread of its own."""

import logging
import os
import stat
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from hybridserve.cluster.access.key_text import KeysError, parse_keys
from hybridserve.cluster.access.keys import Keyring

_POLL_S = 1.0
# a file changed twice within the clock's grain keeps its times and maybe its size
_GRAIN_S = 2.0

Signature = tuple[int, int, int, int]

logger = logging.getLogger(__name__)


def read_keys(path: Path) -> Keyring:
    """The keys for a start.

    Raises:
        ValueError: the file cannot be read or used, or has no keys; the message names it.
    """
    try:
        ring = Keyring(parse_keys(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ValueError(f"access.keys_file {path}: {error}") from None
    if not ring.entries:
        raise ValueError(
            f"access.keys_file {path}: it has no keys, so that nobody could use the server; "
            f"`hybridserve keys add {path} NAME` makes one"
        )
    return ring


class KeyFile:
    """The keys of a file, at most a second old. `ring` may be read from any thread.

    A file that cannot be read or used leaves the keys as they were, and an error in the log. An empty list
    is no such file: whoever revoked the last key means it.

    Raises:
        ValueError: as `read_keys`.
    """

    def __init__(self, path: Path, poll_s: float = _POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen: Signature | None = None
        self._settled = False
        self._last_error = ""
        self._stop = threading.Event()
        self.ring = read_keys(path)
        self._warn_of_mode()
        self._thread = threading.Thread(target=self._watch, name="keys-file", daemon=True)

    def start(self) -> None:
        """Follow the file until `close`."""
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def check(self) -> None:
        """Read the file if it may have changed. Never raises."""
        try:
            now = _signature(os.stat(self._path))
            if now == self._seen and self._settled:
                return
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                content = file.read()
            # signed before it is read: what is written meanwhile is another signature
            changed, self._seen = _signature(status) != self._seen, _signature(status)
            self._settled = not 0 <= time.time() - status.st_mtime < _GRAIN_S
            ring = Keyring(parse_keys(content.decode("utf-8"), datetime.now(UTC)))
        except (OSError, ValueError) as error:
            self._report(error)
            return
        self._last_error = ""
        if ring.entries != self.ring.entries:
            logger.warning("access.keys_file %s: read again, %d keys", self._path, len(ring.entries))
            self.ring = ring
        if changed:
            self._warn_of_mode()

    def _watch(self) -> None:
        while not self._stop.wait(self._poll_s):
            self.check()

    def _report(self, error: Exception) -> None:
        """Once for each new thing that is wrong."""
        message = str(error)
        if message != self._last_error:
            self._last_error = message
            kind = "" if isinstance(error, KeysError) else f"{type(error).__name__}: "
            logger.error("access.keys_file %s: %s%s; the keys stay as they were", self._path, kind, message)

    def _warn_of_mode(self) -> None:
        try:
            mode = os.stat(self._path).st_mode
        except OSError as error:
            logger.warning("access.keys_file %s: its mode is not known: %s", self._path, error)
            return
        if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
            logger.warning(
                "access.keys_file %s: mode %03o lets others read or write it; chmod 600 (or 640) it",
                self._path,
                stat.S_IMODE(mode),
            )


def _signature(status: os.stat_result) -> Signature:
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev
