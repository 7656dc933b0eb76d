"""`hybridserve serve CONFIG`: a thin wrapper of `serve run` that says when it is ready, or why not."""

import json
import os
import shlex
import socket
import ssl
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from hybridserve.cluster.access.exposure import is_loopback, open_server_warning
from hybridserve.cluster.cli.plan import print_plan
from hybridserve.cluster.plan import check_shards
from hybridserve.cluster.serve_alpha.proxy_mode import environment
from hybridserve.cluster.serve_file import read_application, read_settings
from hybridserve.cluster.serve_process import ServeProcess
from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import load_settings

_POLL_S = 0.2


@dataclass(frozen=True)
class ServeFile:
    """What the wrapper reads in a Serve YAML."""

    content: dict[str, object]
    settings: AppSettings
    url: str
    """Where the application answers, without a slash at the end."""
    listens_on: str = "127.0.0.1"
    """The address that the HTTP server is bound to."""


def serve(
    config: Annotated[Path, typer.Argument(help="Serve YAML, like configs/demo.yaml.")],
    port: Annotated[
        int | None, typer.Option(help="HTTP port, instead of the YAML's.", min=1, max=65535)
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(help="Seconds that answers in progress may go on when the server is stopped.", min=0),
    ] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="As `plan`: show what it takes, start nothing.")
    ] = False,
) -> None:
    """Serve a model: `serve run CONFIG`, checked beforehand and announced when it is ready."""
    if dry_run:
        print_plan(config)
        return
    began = time.monotonic()
    file = read_serve_file(config, port)
    if file.settings.access.keys_file is None and not is_loopback(file.listens_on):
        typer.echo(open_server_warning(file.listens_on), err=True)
    if not _cluster_runs():
        check_port_is_free(file.url)
    written = nullcontext(config) if port is None else _written(file.content)
    with (
        written as path,
        _environment(file) as environment,
        ServeProcess(path, typer.echo, environment, drain_s) as child,
    ):
        failure = _wait_until_ready(child, file.url)
        if failure is None and child.exit_code is None:
            typer.echo(f"\nready in {time.monotonic() - began:.1f} s; try it:\n{_curl(file)}\n")
            child.wait()
    if failure is not None:
        raise ValueError(f"the server did not start: {failure}")
    raise typer.Exit(child.wait())


def proxy_env(
    config: Annotated[Path, typer.Argument(help="Serve YAML, like configs/h200x8.yaml.")],
    folder: Annotated[
        Path, typer.Option(help="Where HAProxy's configuration and sockets are to be, on every node.")
    ] = Path("/run/hybridserve"),
) -> None:
    """Print the environment variables of the configuration's proxy, for a cluster that is started by itself.

    Every process of the cluster needs them: `eval "$(hybridserve proxy-env CONFIG)"` before `ray start`, or
    in a pod's `env`.
    """
    settings = read_settings(config)
    for name, value in _proxy_environment(settings, folder).items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def read_serve_file(config: Path, port: int | None = None) -> ServeFile:
    """Read and check a Serve YAML, its port replaced when one is given.

    Raises:
        ValueError: it is no Serve YAML with our application in it, or a setting is wrong.
        OSError: it cannot be read.
    """
    content, ours = read_application(config)
    settings = load_settings(ours.get("args", {}), Path.cwd())
    # the engine's own bounds, which would otherwise be told only after a cluster has started
    for spec in settings.pool_specs():
        settings.engine_config("cpu", spec)
    check_shards(settings)
    http = dict(content.get("http_options") or {})
    if port is not None:
        http["port"] = port
    _check_port(http.get("port", 8000))
    host = http.get("host", "127.0.0.1")
    listens_on = str(host)
    if http.get("ssl_certfile") and settings.ingress.proxy == "haproxy":
        raise ValueError(
            f"http_options.ssl_certfile {http['ssl_certfile']!r}: Serve's HAProxy does not speak TLS; put a "
            "load balancer that does before it, or set ingress.proxy to serve (docs/security.md)"
        )
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    prefix = str(ours.get("route_prefix") or "/").rstrip("/")
    scheme = "https" if http.get("ssl_certfile") else "http"
    url = f"{scheme}://{host}:{http.get('port', 8000)}{prefix}"
    return ServeFile({**content, "http_options": http}, settings, url, listens_on)


def _check_port(port: object) -> None:
    # 0 would be a port of the system's choice, which nobody is told
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ValueError(f"http_options.port must be a whole number from 1 to 65535, got {port!r}")


def check_port_is_free(url: str) -> None:
    """Raise ValueError when somebody listens there: it would answer for a server that never starts."""
    address = urllib.parse.urlsplit(url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    try:
        with socket.create_connection((host, port), timeout=2):
            pass
    except OSError:
        return
    raise ValueError(f"http_options.port {port} is in use on {host}; another can be given with --port")


def _cluster_runs() -> bool:
    """Whether `serve run` joins a Ray cluster, whose own proxy may hold the port already."""
    folder = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"
    return "RAY_ADDRESS" in os.environ or (folder / "ray_current_cluster").exists()


def _wait_until_ready(child: ServeProcess, url: str) -> str | None:
    """None when it is ready or has ended by itself, else why it will never be."""
    while child.exit_code is None:
        if child.failure is not None:
            return child.failure
        if _answers(f"{url}/ready"):
            return None
        time.sleep(_POLL_S)
    return None


def _unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _answers(url: str) -> bool:
    try:
        # the certificate is for whatever name clients use; here it is only asked whether the server is up
        with urllib.request.urlopen(url, timeout=10, context=_unverified()) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _curl(file: ServeFile) -> str:
    body = json.dumps(
        {"model": file.settings.model.served_name, "prompt": "def fibonacci(n):", "max_tokens": 48}
    )
    header = shlex.quote("Content-Type: application/json")
    key = "" if file.settings.access.keys_file is None else '-H "Authorization: Bearer $API_KEY" '
    return f"curl {file.url}/v1/completions {key}-H {header} -d {shlex.quote(body)}"


@contextmanager
def _environment(file: ServeFile) -> Iterator[dict[str, str]]:
    """For the Serve that is started here; what HAProxy keeps on disk lives as long as the context."""
    ingress = file.settings.ingress
    # not where TMPDIR may lead: a socket's path must be short
    with tempfile.TemporaryDirectory(prefix="hybridserve-", dir="/tmp") as folder:
        variables = _proxy_environment(file.settings, Path(folder))
        if ingress.proxy == "haproxy":
            # two servers of one machine must not ask for the same one
            variables["RAY_SERVE_FALLBACK_PROXY_HTTP_PORT"] = str(_free_port())
        yield variables


def _proxy_environment(settings: AppSettings, folder: Path) -> dict[str, str]:
    longest = settings.serving.longest_answer_s
    return environment(settings.ingress.proxy, folder, longest, settings.ingress_requests())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _written(content: dict[str, object]) -> Iterator[Path]:
    """The content as a YAML file that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="hybridserve-") as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump(content))
        yield path
