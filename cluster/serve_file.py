"""The Serve YAML of one of our applications: where it is found in the file, and how it is checked."""

from pathlib import Path

import yaml

from hybridserve.cluster.settings import AppSettings
from hybridserve.cluster.settings_reading import parse_settings

BUILDER = "hybridserve.cluster.app:build_app"


def read_application(config: Path) -> tuple[dict[str, object], dict[str, object]]:
    """The file's content, and in it our application.

    Raises:
        ValueError: it is no Serve YAML with our application in it.
        OSError: it cannot be read.
    """
    try:
        content = yaml.safe_load(config.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{config} is not YAML: {error}") from None
    applications = content.get("applications") if isinstance(content, dict) else None
    for app in applications or []:
        if isinstance(app, dict) and app.get("import_path") == BUILDER:
            return content, app
    raise ValueError(f"{config} has no application with import_path {BUILDER}")


def read_settings(config: Path) -> AppSettings:
    """The settings of our application in the file; its model is not looked at.

    Raises:
        ValueError: it is no Serve YAML with our application in it, or a setting is wrong.
        OSError: it cannot be read.
    """
    return parse_settings(read_application(config)[1].get("args", {}))
