"""Log lines name what they are about, for people and for machines."""

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, log_format
from mooncake_transfer._notices import LEVELS
from mooncake_transfer.errors import RemoteError
from mooncake_transfer.log_format import JsonLines, TextLines, fields_of

DEADLINE_S = 20.0


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
    said = f"handler of 'a.method' failed for {asking.address}"
    (record,) = [record for record in caplog.records if record.getMessage() == said]
    assert fields_of(record) == {"peer": asking.address, "method": "a.method"}


def test_a_notification_that_fails_leaves_a_line_that_names_the_peer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TransferConfig(drivers=("tcp",))
    heard = threading.Event()

    def fail(*_: object) -> None:
        raise ValueError("no")

    with TransferEngine(config) as served, TransferEngine(config) as asking:
        served.serve("fail", fail)
        served.serve("hear", lambda payload, caller: heard.set())
        peer = asking.connect(served.address)
        peer.notify("fail")
        peer.notify("hear")
        assert heard.wait(DEADLINE_S)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"handling notify 'fail' of {asking.address} failed"
    assert fields_of(record) == {"peer": asking.address, "method": "fail"}


def test_a_peer_cannot_fill_the_log_with_methods_that_nobody_takes(caplog: pytest.LogCaptureFixture) -> None:
    config = TransferConfig(drivers=("tcp",))
    heard = threading.Event()
    with TransferEngine(config) as served, TransferEngine(config) as asking:
        served.serve("hear", lambda payload, caller: heard.set())
        peer = asking.connect(served.address)
        for turn in range(100):
            peer.notify("nobody\n" + "x" * 300)
            peer.notify(f"nobody {turn}")
        peer.notify("hear")
        assert heard.wait(DEADLINE_S)
    lines = [record for record in caplog.records if record.name == "mooncake_transfer._serving"]
    assert len(lines) == 8
    assert {(record.levelno, record.exc_info) for record in lines} == {(logging.WARNING, None)}
    assert lines[0].getMessage().startswith(f"{asking.address} notifies 'nobody\\nxxx")
    assert all(fields_of(record)["peer"] == asking.address for record in lines)
    assert all("\n" not in TextLines().format(record) for record in lines)
    assert all(len(record.getMessage()) < 250 for record in lines)
    assert "no further method is logged" in lines[-1].getMessage()
    assert "no further" not in lines[-2].getMessage()
