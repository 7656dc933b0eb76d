"""The servers that a load is sent to: started from a configuration, and that configuration with one pool."""

import copy
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from hybridserve.cluster.cli.serve import ServeFile, read_serve_file
from hybridserve.cluster.serve_file import read_application
from hybridserve.cluster.simulation.merging import merged_pools

# above what Ray gives its workers, below what the system gives who asks for any port
_PORTS = range(20000, 32768)
READY_TIMEOUT_S = 300.0


@contextmanager
def started(config: Path, merged: bool = False, port: int | None = None) -> Iterator[ServeFile]:
    """`hybridserve serve` of the configuration, ready; with all its pools in one when `merged`."""
    content, application = copy.deepcopy(read_application(config))
    content["applications"] = [application]
    if merged:
        application["args"] = merged_pools(application["args"])
    port = free_port() if port is None else port
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / config.name
        written.write_text(yaml.safe_dump(content))
        file = read_serve_file(written, port)
        with running_server(written, port, file.url):
            yield file


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise SystemExit("none of a hundred ports is free")


@contextmanager
def running_server(config: Path, port: int, url: str) -> Iterator[float]:
    """Seconds from starting `hybridserve serve` until it is ready."""
    command = "import sys; from hybridserve.cluster.cli.main import main; sys.exit(main())"
    began = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", command, "serve", str(config), "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not answers(url):
                if process.poll() is not None or time.monotonic() > began + READY_TIMEOUT_S:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read().decode(errors='replace')}")
                time.sleep(0.1)
            yield time.monotonic() - began
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
