"""The servers that a load is sent to: started from a configuration, and that configuration with one pool."""

import copy
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from bench_http import running_server

from hybridserve.cluster.cli.serve import ServeFile, read_serve_file
from hybridserve.cluster.serve_file import read_application
from hybridserve.cluster.simulation.merging import merged_pools

# above what Ray gives its workers, below what the system gives who asks for any port
_PORTS = range(20000, 32768)


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
