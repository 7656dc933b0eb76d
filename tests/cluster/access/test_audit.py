"""The audit log's writer and its file, shared by several processes."""

import json
import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from hybridserve.cluster.access.audit import AuditLog, open_audit
from hybridserve.cluster.access.audit_file import SharedFile
from hybridserve.cluster.access.options import AuditSettings


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Sink:
    """Takes lines when it is let to; can be full."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.error: OSError | None = None
        self.lines: list[dict[str, object]] = []

    def write(self, lines: bytes) -> None:
        assert self.open.wait(30)
        if self.error is not None:
            raise self.error
        self.lines += map(json.loads, lines.splitlines())

    def close(self) -> None:
        """Nothing to close."""


def until(reached) -> None:
    deadline = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_lines_are_written_in_order_and_the_file_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "audit.jsonl"
    log = open_audit(AuditSettings(path=str(path)))
    for number in range(1000):
        log.put({"number": number, "text": "é\ud800\n"})
    log.close()
    assert [line["number"] for line in lines_of(path)] == list(range(1000))
    assert lines_of(path)[0]["text"] == "é\ud800\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    log = open_audit(AuditSettings(path="stdout"))
    log.put({"a": 1})
    log.close()
    assert capfd.readouterr().out == '{"a":1}\n'


def test_what_is_too_much_is_counted_and_told() -> None:
    sink = Sink()
    sink.open.clear()
    log = AuditLog(sink, max_queued=10)
    began = time.monotonic()
    for number in range(500):
        log.put({"number": number})
    assert time.monotonic() - began < 5
    sink.open.set()
    until(lambda: log._queue.empty())
    log.put({"number": 500})
    log.close()
    dropped = sum(line["count"] for line in sink.lines if line.get("event") == "dropped")
    written = [line["number"] for line in sink.lines if "number" in line]
    assert dropped >= 400 and dropped + len(written) == 501
    assert written == sorted(written) and written[-1] == 500


def test_texts_are_bounded_by_their_bytes() -> None:
    sink = Sink()
    sink.open.clear()
    log = AuditLog(sink, max_text_bytes=1000)
    for _ in range(10):
        log.put({"request": "x" * 300}, text_bytes=300)
    log.put({"request": "", "last": True})
    sink.open.set()
    log.close()
    assert sum("request" in line for line in sink.lines) == 4
    assert [line["count"] for line in sink.lines if "count" in line] in ([7], [1, 6])
    # what is written is forgotten
    assert log._text_bytes == 0


def test_a_full_disk_loses_lines_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sink = Sink()
    sink.error = OSError("no space left")
    log = AuditLog(sink)
    log.put({"number": 1})
    until(lambda: log._dropped == 1)
    log.put({"number": 2})
    until(lambda: log._dropped == 2)
    sink.error = None
    log.put({"number": 3})
    log.close()
    assert [line.get("count", line.get("number")) for line in sink.lines] == [2, 3]
    assert [record.getMessage() for record in caplog.records] == ["audit log: lines are lost: no space left"]


def test_files_are_rotated_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = SharedFile(path, rotate_bytes=100, max_files=3)
    for number in range(40):
        file.write(b'{"number":%4d}\n' % number)
    file.close()
    files = [path, Path(f"{path}.1"), Path(f"{path}.2")]
    assert sorted(os.listdir(tmp_path)) == [
        "audit.jsonl",
        "audit.jsonl.1",
        "audit.jsonl.2",
        "audit.jsonl.lock",
    ]
    numbers = [line["number"] for one in reversed(files) for line in lines_of(one)]
    assert numbers == list(range(numbers[0], 40))
    assert all(one.stat().st_size <= 100 + 16 for one in files)


def test_one_file_is_thrown_away_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = SharedFile(path, rotate_bytes=40, max_files=1)
    for number in range(9):
        file.write(b'{"number":%4d}\n' % number)
    assert len(lines_of(path)) <= 3 and lines_of(path)[-1]["number"] == 8
    assert sorted(os.listdir(tmp_path)) == ["audit.jsonl", "audit.jsonl.lock"]


def test_a_file_that_somebody_moved_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    file = SharedFile(path, rotate_bytes=10**6, max_files=2)
    file.write(b"{}\n")
    path.rename(tmp_path / "moved")
    file.write(b"{}\n")
    assert lines_of(path) == [{}] == lines_of(tmp_path / "moved")


def _write(path: Path, writer: int, lines: int) -> None:
    file = SharedFile(path, rotate_bytes=20_000, max_files=100)
    for number in range(lines):
        file.write(
            json.dumps({"writer": writer, "number": number, "pad": "x" * (number % 300)}).encode() + b"\n"
        )


def test_several_processes_lose_and_tear_no_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    # forked: a spawned child would import all that the tests have imported
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_write, args=(path, writer, 400)) for writer in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    found = [line for one in tmp_path.glob("audit.jsonl*") if one.suffix != ".lock" for line in lines_of(one)]
    assert len(list(tmp_path.iterdir())) > 5
    assert sorted((line["writer"], line["number"]) for line in found) == [
        (writer, number) for writer in range(4) for number in range(400)
    ]
