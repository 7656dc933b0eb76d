"""What `hybridserve serve` reads before it starts anything, and how it tells a failed start."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from hybridserve.cluster import serve_process
from hybridserve.cluster.access.exposure import is_loopback, open_server_warning
from hybridserve.cluster.cli import serve as cli_serve
from hybridserve.cluster.cli.main import app
from hybridserve.cluster.cli.serve import check_port_is_free, read_serve_file
from hybridserve.cluster.serve_file import BUILDER
from hybridserve.cluster.serve_process import ServeProcess


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    (tmp_path / "config.json").write_text("{}")

    def write(application: dict[str, object], **top: object) -> Path:
        app = {"import_path": BUILDER, "args": {"model": {"path": str(tmp_path)}}, **application}
        path = tmp_path / "serve.yaml"
        path.write_text(yaml.safe_dump({"applications": [app], **top}))
        return path

    return write


def test_the_address_follows_the_yaml_and_the_port_option(write) -> None:
    assert read_serve_file(write({})).url == "http://127.0.0.1:8000"
    path = write({"route_prefix": "/llm"}, http_options={"host": "0.0.0.0", "port": 9000})
    assert read_serve_file(path).url == "http://127.0.0.1:9000/llm"
    moved = read_serve_file(path, port=9001)
    assert moved.url == "http://127.0.0.1:9001/llm"
    assert moved.content["http_options"] == {"host": "0.0.0.0", "port": 9001}


def test_certificates_make_it_https_and_do_not_go_with_haproxy(write, tmp_path: Path) -> None:
    tls = {"host": "0.0.0.0", "ssl_certfile": "a.pem", "ssl_keyfile": "a.key"}
    file = read_serve_file(write({}, http_options=tls))
    assert (file.url, file.listens_on) == ("https://127.0.0.1:8000", "0.0.0.0")
    args = {"model": {"path": str(tmp_path)}, "ingress": {"proxy": "haproxy"}}
    with pytest.raises(ValueError, match="http_options.ssl_certfile 'a.pem': Serve's HAProxy does not speak"):
        read_serve_file(write({"args": args}, http_options=tls))


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.1.2.3", False), ("x", False)],
)
def test_who_reaches_a_server(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone
    assert host in open_server_warning(host)


def test_an_open_server_for_everybody_is_warned_of(write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started: it ends at the port that is in use."""
    monkeypatch.setattr(cli_serve, "_cluster_runs", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        for host, warned in (("0.0.0.0", True), ("127.0.0.1", False)):
            path = write({}, http_options={"host": host, "port": other.getsockname()[1]})
            done = CliRunner().invoke(app, ["serve", str(path)])
            assert "is in use" in str(done.exception)
            assert ("SECURITY" in done.output) is warned


def test_errors_come_before_anything_is_started(write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown key modle"):
        read_serve_file(write({"args": {"modle": 1, "model": {"path": "x"}}}))
    with pytest.raises(ValueError, match="page_size must be a power of two, got 24"):
        model = {"path": str(tmp_path)}
        read_serve_file(write({"args": {"model": model, "serving": {"page_size": 24}}}))
    with pytest.raises(ValueError, match="args must be a mapping of keys to values, got .1."):
        read_serve_file(write({"args": [1]}))
    for port in (0, 65536, "8000"):
        with pytest.raises(ValueError, match=f"http_options.port must be a whole number .* got {port!r}"):
            read_serve_file(write({}, http_options={"port": port}))
    with pytest.raises(ValueError, match=f"no application with import_path {BUILDER}"):
        read_serve_file(write({"import_path": "other:app"}))
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="broken.yaml is not YAML"):
        read_serve_file(tmp_path / "broken.yaml")
    with pytest.raises(OSError):
        read_serve_file(tmp_path / "missing.yaml")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"http_options.port {port} is in use on 127.0.0.1"):
            check_port_is_free(f"http://127.0.0.1:{port}/llm")
    check_port_is_free(f"http://127.0.0.1:{port}/llm")


FAILING = r"""
import sys, time
print("(Controller) RuntimeError: Traceback (most recent call last):")
print("(Controller) \x1b[36mRuntimeError: the engine did not start: ValueError: missing shard two")
print("(Controller) ERROR Failed to update the deployments ['pool'].", flush=True)
time.sleep(60)
"""


@pytest.fixture
def as_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes ServeProcess run a Python program instead of Serve."""
    popen = serve_process.subprocess.Popen

    def replace(program: str) -> None:
        monkeypatch.setattr(
            serve_process.subprocess,
            "Popen",
            lambda _, **options: popen([sys.executable, "-c", program], **options),
        )

    return replace


def test_a_failed_deployment_is_told_by_its_last_error(as_child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_process, "_SETTLE_S", 0.1)
    as_child(FAILING)
    lines: list[str] = []
    with ServeProcess(Path("x.yaml"), lines.append) as child:
        deadline = time.monotonic() + 20
        while child.failure is None:
            assert time.monotonic() < deadline, lines
            time.sleep(0.05)
        assert child.failure == "the engine did not start: ValueError: missing shard two"
        assert child.exit_code is None
    assert child.exit_code is not None
    assert len(lines) >= 3


ENDS_WITH_5 = """
import threading
import time
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(5)
"""


@contextmanager
def running() -> Iterator[ServeProcess]:
    """The child, once it has said that it is up."""
    up = threading.Event()
    with ServeProcess(Path("x.yaml"), lambda line: up.set()) as child:
        assert up.wait(60)
        yield child


def test_sigint_reaches_the_child_even_when_it_was_ignored(as_child) -> None:
    as_child(ENDS_WITH_5)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with running() as child:
            signal.raise_signal(signal.SIGINT)
            assert child.wait() == 5
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_closed_terminal_ends_the_child(as_child) -> None:
    as_child(ENDS_WITH_5)
    with running() as child:
        signal.raise_signal(signal.SIGHUP)
        assert child.wait() == 5


def test_under_nohup_a_closed_terminal_changes_nothing(as_child) -> None:
    as_child("import time\nprint('up', flush=True)\ntime.sleep(60)")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running() as child:
            signal.raise_signal(signal.SIGHUP)
            time.sleep(0.2)
            assert child.exit_code is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_proxy_env_prints_what_a_shell_takes(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = tmp_path / "bin dir" / "hybridserve-haproxy"
    launcher.parent.mkdir()
    launcher.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher.parent / "python"))
    config = write({"args": {"model": {"path": str(tmp_path)}, "ingress": {"proxy": "haproxy"}}})
    printed = CliRunner().invoke(app, ["proxy-env", str(config), "--folder", "/run/x"])
    assert printed.exit_code == 0, printed.output
    seen = subprocess.run(
        ["sh", "-c", f"{printed.stdout}\nenv"], capture_output=True, text=True, check=True
    ).stdout
    assert f"RAY_SERVE_HAPROXY_BINARY_PATH={launcher}\n" in seen
    assert "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC=/run/x/haproxy.cfg\n" in seen
    plain = CliRunner().invoke(app, ["proxy-env", str(write({}))])
    assert "HAPROXY" not in plain.stdout
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in plain.stdout
