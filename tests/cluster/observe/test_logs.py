"""What a log line holds."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from hybridserve.cluster.observe.logs import ROOT_LOGGER, LogOptions, log_event, set_up_logging
from hybridserve.cluster.observe.trail import RequestTrail, follow

logger = logging.getLogger(f"{ROOT_LOGGER}.some.module")


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger(ROOT_LOGGER)
    before = (root.handlers, root.level, root.propagate)
    yield io.StringIO()
    root.handlers, root.level, root.propagate = before


def test_json_lines_say_who_what_and_for_which_request(lines: io.StringIO) -> None:
    set_up_logging(LogOptions("json", "info"), lines, component="replica", pool="short", replica="")
    log_event(logger, logging.INFO, "engine_up", "it is up", device="cpu", error=None, note="")
    log_event(logger, logging.DEBUG, "too_quiet")
    follow(RequestTrail(request_id="r-1"))
    log_event(logger, logging.WARNING, "slow", seconds=2.5)
    log_event(logger, logging.WARNING, "other", request_id="r-2")
    logger.info("plain\nwith a second line, and a %s", "ü")
    follow(RequestTrail())
    up, slow, other, plain = map(json.loads, lines.getvalue().splitlines())
    assert (up["event"], up["message"], up["level"], up["device"]) == ("engine_up", "it is up", "info", "cpu")
    assert (up["component"], up["pool"]) == ("replica", "short")
    assert up["time"].endswith("Z") and up["pid"] and up["logger"] == logger.name
    # what is empty is left out
    assert not {"replica", "error", "note", "request_id"} & up.keys()
    assert (slow["request_id"], slow["seconds"]) == ("r-1", 2.5)
    assert other["request_id"] == "r-2"
    assert plain["message"] == "plain\nwith a second line, and a ü" and plain["event"] == "log"


def test_an_exception_is_a_field_of_its_line(lines: io.StringIO) -> None:
    set_up_logging(LogOptions("json"), lines)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logger.exception("it failed")
    [line] = lines.getvalue().splitlines()
    assert "RuntimeError: broken" in json.loads(line)["exception"]


def test_text_is_for_people(lines: io.StringIO) -> None:
    set_up_logging(LogOptions(), lines, component="engine", replica="abc")
    log_event(logger, logging.WARNING, "engine_request", "failed", request_id="r", error="NaN")
    [line] = lines.getvalue().splitlines()
    assert line.partition(" ")[2] == "WARNING engine/abc failed request_id=r error=NaN"


def test_setting_up_again_replaces(lines: io.StringIO) -> None:
    set_up_logging(LogOptions("json"), io.StringIO())
    set_up_logging(LogOptions("text", "error"), lines)
    logger.warning("not this")
    logger.error("this")
    assert lines.getvalue().count("\n") == 1
