"""A replica whose ranks are processes of this machine: starting, watching and ending those above 0.

Rank 0 is this process. What the others do is in `rank_main`.
"""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

from hybridserve.parallel.group import SINGLE, connect
from hybridserve.parallel.rendezvous import LOOPBACK, host_store, poll_until
from hybridserve.parallel.step_channel.board import RankState
from hybridserve.parallel.step_channel.channel import StepChannel
from hybridserve.parallel.step_channel.opening import open_channel
from hybridserve.parallel.step_channel.watch import RankFailure, RankWatch
from hybridserve.replicas.engine.config import EngineConfig

logger = logging.getLogger(__name__)

END = b"end"
"""The message after the last plan; no plan begins like it."""
END_S = 3.0
"""How long ranks may take to end by themselves."""
_PROGRAM = "from hybridserve.replicas.engine.rank_main import main; main()"


def failure_key(rank: int) -> str:
    """Where on the store a rank leaves the reason of its end."""
    return f"failure/{rank}"


class LocalRanks:
    """Ranks 1 … size-1, and what this process, rank 0, shares with them.

    Not for use after `stop`.
    """

    def __init__(self, config: EngineConfig, backend: str) -> None:
        """Start the processes and meet them.

        Raises:
            RankFailure: one of them has failed; names it and says why.
        """
        self.size = config.tensor_parallel_size
        self.group = SINGLE
        self.channel: StepChannel | None = None
        self._is_stopped = False
        self._pid = os.getpid()
        self._store = host_store(LOOPBACK)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.watch = RankWatch(self.size, self._end_of, self._give_up)
        try:
            for rank in range(1, self.size):
                self._processes[rank] = _start(config, rank, self._store.port)
            self.watch.start()
            self.channel = open_channel(self._store, 0, self.size, self.watch.check)
            self.watch.attach(self.channel.board)
            self.group = connect(0, self.size, self._store, backend=backend, address=LOOPBACK)
        except BaseException:
            self.stop(0.0)
            raise

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once `done()` is true; raises RankFailure when a rank fails meanwhile."""
        poll_until(done, self.watch.check)

    def finish_start(self) -> None:
        """Wait until all are ready; from now on they have to be on time."""
        board = self.channel.board
        board.report(RankState.READY)
        self.wait(lambda: all(board.row(rank).state == RankState.READY for rank in range(1, self.size)))
        self.watch.count_silence()

    def stop(self, patience_s: float = END_S) -> None:
        """End the processes, killing those that have not ended after `patience_s`; after the first call
        nothing happens."""
        # a fork of this process has no ranks of its own
        if self._is_stopped or os.getpid() != self._pid:
            return
        self._is_stopped = True
        # before the end of a rank could be taken for a failure
        self.watch.stop()
        if self.watch.failure is None and self.channel is not None and patience_s > 0:
            with contextlib.suppress(RuntimeError, TimeoutError):
                self.channel.send(END)
                self._wait(patience_s)
        self._kill()
        if self.channel is not None:
            self.channel.close()

    def _wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def _kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
            process.stdin.close()

    def _give_up(self, failure: RankFailure) -> None:
        """A rank has failed: the others are of no use, and their end ends what this process waits for."""
        self._kill()
        self.group.abort()

    def _end_of(self, rank: int) -> tuple[bool, str] | None:
        code = self._processes[rank].poll()
        if code is None:
            return None
        key = failure_key(rank)
        if self._store.check([key]):
            return True, f"failed: {self._store.get(key).decode()}"
        if code < 0:
            return False, f"was killed by {signal.Signals(-code).name}"
        return False, f"exited with code {code}"


def _start(config: EngineConfig, rank: int, port: int) -> "subprocess.Popen[bytes]":
    """A process that will be rank `rank`.

    A plain interpreter, not multiprocessing's: that would import the caller's main module again, so that
    every script would need a guard.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    # threads that spin while they wait would take the cores from the other ranks
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    told = json.dumps({"rank": rank, "port": port, "parent": os.getpid(), "config": asdict(config)})
    process = subprocess.Popen([sys.executable, "-P", "-c", _PROGRAM], stdin=subprocess.PIPE, env=environment)
    try:
        process.stdin.write(told.encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        # it is dead already, which the watch reports
        logger.warning("rank %d did not take its configuration", rank)
    return process
