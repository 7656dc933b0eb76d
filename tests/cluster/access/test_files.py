"""The files that this repository ships."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from hybridserve.cluster.access.key_text import parse_keys
from hybridserve.cluster.access.options import AccessSettings
from hybridserve.cluster.settings_reading import load_settings


def test_the_example_of_a_keys_file_is_one(repo_root: Path) -> None:
    text = (repo_root / "configs" / "keys.example.yaml").read_text()
    first, second = parse_keys(text, datetime(2026, 12, 1, tzinfo=UTC))
    assert (first.limits.max_concurrent, first.priority, second.priority) == (32, "normal", "low")


def test_paths_start_where_the_server_does(tmp_path: Path) -> None:
    settings = AccessSettings.model_validate(
        {
            "keys_file": "keys.yaml",
            "audit": {"path": "logs/audit.jsonl"},
            "bus_tls": {"certfile": "a.pem", "keyfile": "/etc/b.pem", "cafile": "c.pem"},
        }
    ).resolved(tmp_path)
    assert settings.keys_file == f"{tmp_path}/keys.yaml"
    assert settings.audit is not None and settings.audit.path == f"{tmp_path}/logs/audit.jsonl"
    assert settings.bus_tls is not None
    assert settings.bus_tls.certfile == f"{tmp_path}/a.pem" and settings.bus_tls.keyfile == "/etc/b.pem"
    stdout = AccessSettings.model_validate({"audit": {"path": "stdout"}}).resolved(tmp_path)
    assert stdout.audit is not None and stdout.audit.path == "stdout"


def test_a_keys_file_that_cannot_be_used_is_a_bad_configuration(repo_root: Path, tmp_path: Path) -> None:
    args = yaml.safe_load((repo_root / "configs" / "demo.yaml").read_text())["applications"][0]["args"]
    path = tmp_path / "keys.yaml"
    args["access"] = {"keys_file": str(path)}
    for content, reason in ((None, "No such file"), ("keys: []", "no keys"), ("keys: [a]", "line 1: a key")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=f"bad configuration: access.keys_file {path}: .*{reason}"):
            load_settings(args, repo_root)
    args["access"] = {"trusted_proxies": ["10.0.0.0/33"]}
    with pytest.raises(ValueError, match="access.trusted_proxies: must be addresses or networks"):
        load_settings(args, repo_root)
