"""The audit log: one JSON line a request, written by a thread: a slow disk holds up nobody's tokens."""

import atexit
import json
import logging
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from hybridserve.cluster.access.audit_file import SharedFile
from hybridserve.cluster.access.options import STDOUT, AuditSettings

_QUEUE_LINES = 10_000
_QUEUE_TEXT_BYTES = 64 * 2**20
_BATCH_LINES = 256
_CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Where lines go."""

    def write(self, lines: bytes) -> None: ...

    def close(self) -> None: ...


class _Stdout:
    def write(self, lines: bytes) -> None:
        sys.stdout.write(lines.decode())
        sys.stdout.flush()

    def close(self) -> None:
        """It is not ours to close."""


class AuditLog:
    """Takes records from the event loop and writes them on a thread of its own.

    What comes faster than it can be written, more than `max_queued` lines or `max_text_bytes` of prompts and
    answers behind, is counted instead, and a line `{"event": "dropped", "count": …}` says how many as soon as
    there is room; so is what the disk refuses.
    """

    def __init__(
        self, sink: Sink, max_queued: int = _QUEUE_LINES, max_text_bytes: int = _QUEUE_TEXT_BYTES
    ) -> None:
        self._sink = sink
        self._queue: queue.Queue[tuple[Mapping[str, object], int] | None] = queue.Queue(max_queued)
        self._max_text_bytes = max_text_bytes
        self._text_bytes = 0
        self._dropped = 0
        self._lock = threading.Lock()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, record: Mapping[str, object], text_bytes: int = 0) -> None:
        """Never waits. The record is the log's from now on.

        text_bytes: about how much memory its prompts and answers take.
        """
        if text_bytes:
            with self._lock:
                if self._text_bytes + text_bytes > self._max_text_bytes:
                    self._dropped += 1
                    return
                self._text_bytes += text_bytes
        try:
            self._queue.put_nowait((record, text_bytes))
        except queue.Full:
            self._forget(text_bytes, dropped=1)

    def close(self) -> None:
        """Write what is queued, for five seconds at most."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=_CLOSE_S)
            except queue.Full:
                logger.error("audit log: the disk is too slow; queued lines are lost")
                return
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        more = True
        while more:
            batch = [self._queue.get()]
            while len(batch) < _BATCH_LINES and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            items = [item for item in batch if item is not None]
            more = len(items) == len(batch)
            self._write([record for record, _ in items])
            self._forget(sum(text_bytes for _, text_bytes in items))
        self._sink.close()

    def _write(self, records: list[Mapping[str, object]]) -> None:
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            records = [{"time": now, "event": "dropped", "count": dropped}, *records]
        if not records:
            return
        try:
            self._sink.write(b"".join(map(_line, records)))
            self._failing = False
        except OSError as error:
            self._forget(0, dropped=len(records) + dropped - bool(dropped))
            if not self._failing:
                self._failing = True
                logger.error("audit log: lines are lost: %s", error)

    def _forget(self, text_bytes: int, dropped: int = 0) -> None:
        if text_bytes or dropped:
            with self._lock:
                self._text_bytes -= text_bytes
                self._dropped += dropped


def open_audit(settings: AuditSettings) -> AuditLog:
    """The log that the settings ask for; its file is opened with its first line."""
    if settings.path == STDOUT:
        return AuditLog(_Stdout())
    return AuditLog(SharedFile(Path(settings.path), settings.rotate_bytes, settings.max_files))


def _line(record: Mapping[str, object]) -> bytes:
    # what a client sent may hold half a surrogate pair, which UTF-8 does not have: escaped, it does no harm
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
