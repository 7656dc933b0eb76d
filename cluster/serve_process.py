"""A `serve run` child process: its output passed on, its failure recognised, its end by a signal.

Knows how Serve words a failed deployment. Knows nothing of what is served.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

_PROGRAM = "hybridserve.cluster.serve_alpha.serve_run"
# `serve run` sleeps on after an application has failed for good: its words are all there is to go by
_FAILED = re.compile(r"Failed to update the deployments|Deploying app .* failed|Failed to deploy app")
_ERROR = re.compile(r"\b(?:[\w.]+\.)?\w+(?:Error|Exception): (?P<message>\S.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# the error's own lines may come just after the line that says that there was one
_SETTLE_S = 1.5


class ServeProcess:
    """Runs `serve_run` of the YAML by this same Python, from `with` to its end.

    Inside the `with`, SIGINT, SIGTERM and SIGHUP (a terminal that closes) to this process are the child's
    SIGINT, upon which it ends what is in flight and shuts Serve down; a second one (but for
    SIGHUP) has it kill what it started.

    Args:
        config: the YAML.
        drain_s: how long answers in progress may go on.
        output: is called with each line of the child's output, on a thread of its own.
        environment: for Serve, where this process' own does not say otherwise. Serve reads it when its
            processes start, so a cluster that runs already keeps what it has.
    """

    def __init__(
        self,
        config: Path,
        output: Callable[[str], None],
        environment: Mapping[str, str] | None = None,
        drain_s: float = 0.0,
    ) -> None:
        self._config = config
        self._drain_s = drain_s
        self._output = output
        self._environment = dict(environment or {})
        self._last_error = ""
        self._failed_at: float | None = None
        self._handlers: dict[int, signal._HANDLER] = {}
        self._interrupted = False

    def __enter__(self) -> "ServeProcess":
        # before the child is born: a shell starts background jobs with SIGINT ignored, and a child that
        # inherits that ignores it for good
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup's way of saying that the server is to outlive its terminal
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, self._forward)
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, str(self._config), "--drain-s", str(self._drain_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**self._environment, **os.environ},
            # a Ctrl-C in the terminal is for us; Ray's processes are not to see it
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="serve-output", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._interrupted:
            # once more would not let it end by itself
            self.interrupt()
        self.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    @property
    def failure(self) -> str | None:
        """Why the application could not start, once Serve has said so."""
        if self._failed_at is None or time.monotonic() < self._failed_at + _SETTLE_S:
            return None
        return self._last_error or "the application could not be deployed; its log above says why"

    def interrupt(self) -> None:
        """Ask it to shut down, as Ctrl-C does."""
        self._interrupted = True
        if self.exit_code is None:
            self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        code = self._process.wait()
        self._reader.join(timeout=5)
        return code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        # a shell whose terminal closes sends it again: that is no wish to stop at once
        if number != signal.SIGHUP or not self._interrupted:
            self.interrupt()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output(line.rstrip("\n"))
            plain = _COLOUR.sub("", line)
            if error := _ERROR.search(plain):
                self._last_error = error["message"].strip()
            if self._failed_at is None and _FAILED.search(plain):
                self._failed_at = time.monotonic()
