"""Log lines name what they are about, for people and for machines."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, log_format
from mooncake_transfer._notices import LEVELS
from mooncake_transfer.errors import RemoteError
from mooncake_transfer.log_format import JsonLines, TextLines, fields_of


@pytest.fixture
def lines() -> Iterator[tuple[logging.Logger, io.StringIO, logging.StreamHandler]]:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    log = logging.getLogger("mooncake_transfer.a_test")
    log.addHandler(handler)
    log.propagate = False
    yield log, written, handler
    log.removeHandler(handler)
    log.propagate = True


def test_a_text_line_ends_with_its_fields(lines) -> None:
    log, written, handler = lines
    handler.setFormatter(TextLines())
    log.warning("lost %d slices", 3, extra={"peer": "127.0.0.1:1", "rail": "tcp a -> b", "region": ""})
    line = written.getvalue()
    assert line.endswith(
        'WARNING mooncake_transfer.a_test lost 3 slices peer=127.0.0.1:1 rail="tcp a -> b"\n'
    )


def test_a_json_line_has_its_fields_and_its_exception(lines) -> None:
    log, written, handler = lines
    handler.setFormatter(JsonLines())
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed", extra={"event": "rail failed", "region": "kv", "unlisted": 1})
    line = json.loads(written.getvalue())
    assert line["message"] == "failed"
    assert (line["event"], line["region"]) == ("rail failed", "kv")
    assert "ValueError: no" in line["exception"]
    assert set(line) == {"time", "level", "logger", "message", "event", "region", "exception"}


def test_every_event_of_a_rail_is_in_the_table() -> None:
    table = str(log_format.__doc__)
    assert [event for event in LEVELS if f"``{event}``" not in table] == []


def test_a_handler_that_fails_leaves_a_line_that_names_its_method(caplog: pytest.LogCaptureFixture) -> None:
    config = TransferConfig(drivers=("tcp",))

    def fail(*_: object) -> bytes:
        raise ValueError("no")

    with (
        TransferEngine(config) as served,
        TransferEngine(config) as asking,
        caplog.at_level(logging.DEBUG, "mooncake_transfer"),
    ):
        served.serve("a.method", fail)
        with pytest.raises(RemoteError):
            asking.connect(served.address).call("a.method")
    (record,) = [record for record in caplog.records if record.getMessage() == "handler of a.method failed"]
    assert fields_of(record) == {"method": "a.method"}
