"""A process that imports torch once and forks the ranks of groups: `python rank_host.py FOLDER`.

Reads pickled jobs from its standard input, (tp_size, file, name of a function in it, keyword arguments), has
every rank of a gloo group of that size call function(group, **arguments), and writes the pickled list of
(whether it went well, result or traceback) of all ranks. A group lives on for further jobs until one fails.
"""

import ctypes
import os
import pickle
import runpy
import signal
import sys
import traceback
from dataclasses import dataclass
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# what jobs import: the ranks, being forks, have it already
import pytest  # noqa: F401
import torch
import torch.distributed as dist

import hybridserve.replicas.engine.engine
import hybridserve.replicas.models.registry
import hybridserve.replicas.runner.runner  # noqa: F401
from hybridserve.parallel.group import connect

PR_SET_PDEATHSIG = 1
TIMEOUT_S = 30.0

load = cache(runpy.run_path)


@dataclass
class Group:
    """The ranks' processes, and what each is reached by."""

    pids: list[int]
    pipes: list[Connection]

    @classmethod
    def start(cls, size: int, store: Path) -> "Group":
        group = cls([], [])
        for rank in range(size):
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                ours.close()
                serve(rank, size, store, theirs)
            theirs.close()
            group.pids.append(pid)
            group.pipes.append(ours)
        return group

    def run(self, job: bytes) -> list[tuple[bool, Any]]:
        for pipe in self.pipes:
            pipe.send_bytes(job)
        return [pickle.loads(pipe.recv_bytes()) for pipe in self.pipes]

    def stop(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def serve(rank: int, size: int, store: Path, pipe: Connection) -> None:
    """A rank's life; ends with its process."""
    try:
        group = connect(rank, size, dist.FileStore(str(store), size), timeout_s=TIMEOUT_S)
        while True:
            path, function, arguments = pickle.loads(pipe.recv_bytes())
            try:
                answer = (True, load(path)[function](group, **arguments))
            except Exception:
                answer = (False, traceback.format_exc())
            # not through the pipe's own pickler, with which torch would pass shared memory
            pipe.send_bytes(pickle.dumps(answer))
    finally:
        os._exit(1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    groups: dict[int, Group] = {}
    started = 0
    while True:
        try:
            size, *job = pickle.load(sys.stdin.buffer)
        except EOFError:
            break
        if size not in groups:
            groups[size] = Group.start(size, folder / f"store{started}")
            started += 1
        answers = groups[size].run(pickle.dumps(job))
        if not all(well for well, _ in answers):
            # ranks may be waiting for each other in different places
            groups.pop(size).stop()
        pickle.dump(answers, results)
        results.flush()
    for group in groups.values():
        group.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
