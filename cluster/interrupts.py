"""A process' interrupts: the first one is Python's own, a second one ends all that it has started, at once.

Knows nothing of what has been started, or of how it would end by itself.
"""

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""The exit status by which shells know a process that SIGINT ended."""
# memory of a killed process takes the kernel a while; its port is free then, too
_GONE_S = 5.0


class Interrupts:
    """What SIGINT does from now on; made once, in a process' main thread.

    The first one raises KeyboardInterrupt there. The next one kills the process' descendants, whatever it and
    they are doing, and ends the process with status `INTERRUPTED`. Nothing is unwound, so nothing is said.

    Args:
        before: called first of all, at the second one, with whether there are descendants; on another thread.
    """

    def __init__(self, before: Callable[[bool], None]) -> None:
        self._before = before
        self._came = False
        self._told, told = os.pipe()
        os.set_blocking(told, False)
        signal.signal(signal.SIGINT, self._raise_once)
        # a byte for every signal, written where it arrives: the main thread may be in a call that takes long,
        # or about to begin one that the signal came too early to end
        signal.set_wakeup_fd(told)
        threading.Thread(target=self._watch, name="interrupts", daemon=True).start()

    def _raise_once(self, number: int, frame: FrameType | None) -> None:
        if not self._came:
            self._came = True
            raise KeyboardInterrupt

    def _watch(self) -> None:
        came = 0
        while came < 2:
            came += os.read(self._told, 64).count(signal.SIGINT)
        started = descendants(os.getpid())
        try:
            self._before(bool(started))
        finally:
            try:
                _hush()
                kill(started)
            finally:
                os._exit(INTERRUPTED)


def descendants(root: int) -> list[int]:
    """Processes that `root` started, and theirs, unless they have ended; parents before their children."""
    children = defaultdict(list)
    for pid, parent in _processes():
        children[parent].append(pid)
    found = [root]
    for pid in found:
        found += children[pid]
    return found[1:]


def kill(pids: list[int]) -> None:
    """Kill processes in this order, and see them gone."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            # its parent's end was its own
            continue
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline and {pid for pid, _ in _processes()} & set(pids):
        time.sleep(0.01)


def _hush() -> None:
    """Nothing of this process is heard any more: a library's threads would tell of each process that goes."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _processes() -> Iterator[tuple[int, int]]:
    """(pid, parent's pid) of every process that is no zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                # it has ended since the folder was listed
                continue
            # the name in brackets may hold anything; what follows it is plain
            state, parent, *_ = stat.rpartition(")")[2].split()
            if state != "Z":
                yield int(entry.name), int(parent)
