"""Ranks above 0 as processes of this machine, which this one starts; their program is `rank_main`."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

from hybridserve.parallel.rendezvous import LOOPBACK
from hybridserve.replicas.engine.ranks import RankStart

logger = logging.getLogger(__name__)

_PROGRAM = "from hybridserve.replicas.engine.rank_main import main; main()"


class LocalProcesses:
    """`RankProcesses`, each with the visible GPU of its rank's number."""

    address = LOOPBACK

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def device_index(self, rank: int) -> int:
        return rank

    def start(self, start: RankStart) -> None:
        # a plain interpreter, not multiprocessing's: that would import the caller's main module again, so
        # that every script would need a guard
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        # threads that spin while they wait would take the cores from the other ranks
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        told = json.dumps({"parent": os.getpid(), "start": asdict(start)})
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM], stdin=subprocess.PIPE, env=environment
        )
        self._processes[start.rank] = process
        try:
            process.stdin.write(told.encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            # it is dead already, which the watch reports
            logger.warning("rank %d did not take its configuration", start.rank)

    def end_of(self, rank: int) -> str | None:
        code = self._processes[rank].poll()
        if code is None:
            return None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
            process.stdin.close()
