"""Log lines for people, or as one JSON object each. Owns what a line holds; nothing of where lines are kept.

A line says when, how grave, which process, what happened (`event`, a word for programs), for which request.
"""

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TextIO

from hybridserve.cluster.observe.trail import current_request_id

ROOT_LOGGER = "hybridserve"
"""All of this project's loggers are below it."""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class LogOptions:
    """How one process logs."""

    format: LogFormat = "text"
    level: LogLevel = "info"


def set_up_logging(options: LogOptions, stream: TextIO | None = None, **process: str) -> None:
    """Send this process' lines to `stream` (the process' stderr, which Ray keeps and containers pass on).

    Calling it again replaces what was before.

    Args:
        process: fields that every line has, like `component`, `pool`, `replica`; empty ones are left out.
    """
    # not sys.stderr, in whose place Serve has a logger: that looks at the whole stack for every line, which
    # cost an ingress a quarter of a request
    handler = logging.StreamHandler(stream or sys.__stderr__)
    fields = {name: value for name, value in process.items() if value}
    handler.setFormatter(JsonFormatter(fields) if options.format == "json" else TextFormatter(fields))
    logger = logging.getLogger(ROOT_LOGGER)
    logger.handlers = [handler]
    logger.setLevel(options.level.upper())
    # Ray's handlers on the root logger would write every line a second time
    logger.propagate = False


def log_event(logger: logging.Logger, level: int, event: str, message: str = "", **fields: object) -> None:
    """One line; fields that are None or "" are left out."""
    if logger.isEnabledFor(level):
        said = {name: value for name, value in fields.items() if value is not None and value != ""}
        logger.log(level, message or event, extra={"event": event, "fields": said})


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    Args:
        process: fields that every line has.
    """

    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self._process = dict(process)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
            **self._process,
            **_fields(record),
            "logger": record.name,
            "pid": record.process,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: what happened, then the fields."""

    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self._process = dict(process)

    def format(self, record: logging.LogRecord) -> str:
        who = "/".join(self._process.values()) or record.name
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = " ".join(filter(None, (_time(record), record.levelname, who, record.getMessage(), fields)))
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The event's own fields, and the request's id where one is being served."""
    fields: dict[str, object] = getattr(record, "fields", {})
    request_id = current_request_id()
    return fields if not request_id or "request_id" in fields else {"request_id": request_id, **fields}
