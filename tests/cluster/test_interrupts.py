"""A second interrupt ends a process and all that it started, at once and without a word."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# like a server: what it started has started more, which will not hear of an end; its own end takes long
PROGRAM = """
import asyncio, subprocess, sys, time
from hybridserve.cluster.interrupts import Interrupts

deaf = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('up', flush=True); time.sleep(60)"
child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], start_new_session=True)"

async def fail():
    try:
        await asyncio.sleep(60)
    finally:
        raise RuntimeError("a gathered future")

async def end():
    print("ending", flush=True)
    try:
        await asyncio.gather(fail(), fail())
    finally:
        await asyncio.sleep(60)

Interrupts(lambda started: print("started any:", started, flush=True))
try:
    if len(sys.argv) > 1:
        subprocess.Popen([sys.executable, "-c", child, deaf])
    else:
        print("up", flush=True)
    # a signal that comes just before a sleep does not end it
    for _ in range(600):
        time.sleep(0.1)
except KeyboardInterrupt:
    pass
asyncio.run(end())
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *request.param],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # a test run in the background has it ignored, which a child would inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as started:
        yield started
        started.kill()


def family(pid: int) -> list[int]:
    """The process' descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found[1:]


def lives(pid: int) -> bool:
    """Not gone, and not only waiting for its exit status to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("process", [["with children"], []], indirect=True, ids=["family", "alone"])
def test_a_second_interrupt(process: subprocess.Popen[str], request: pytest.FixtureRequest) -> None:
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    others = family(process.pid)
    assert len(others) == (2 if "family" in request.node.name else 0)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "ending\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    # no traceback, and nobody holds the pipe
    assert process.stdout.read() == f"started any: {bool(others)}\n"
    assert process.wait(30) == 130
    assert time.monotonic() - began < 30
    assert not any(map(lives, others))
