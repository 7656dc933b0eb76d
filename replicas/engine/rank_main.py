"""The program of a rank above 0 in a process of its own.

Its standard input gives the configuration and ends with the process that started it, as this one then does.
"""

import json
import logging
import os
import select
import signal
import sys

from hybridserve.parallel.rendezvous import LOOPBACK
from hybridserve.replicas.engine import rank
from hybridserve.replicas.engine.config import EngineConfig
from hybridserve.replicas.engine.ranks import RankStart

logger = logging.getLogger(__name__)


def main() -> None:
    """Be the rank that standard input says."""
    # Ctrl-C is rank 0's to handle: it goes to every process of the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told = json.loads(sys.stdin.buffer.readline())
    start = RankStart(**{**told["start"], "config": EngineConfig(**told["start"]["config"])})
    reason = rank.run_rank(start, LOOPBACK, lambda: _parent_is_gone(told["parent"]), _leave)
    # without the interpreter's own end, which takes long and might wait for a group that is broken
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if reason is None else 1)


def _parent_is_gone(parent: int) -> bool:
    """Whether the process that started this one has ended, or has closed this one's input."""
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) or os.getppid() != parent


def _leave(reason: str) -> None:
    logger.warning("%s: leaving", reason)
    os._exit(1)
