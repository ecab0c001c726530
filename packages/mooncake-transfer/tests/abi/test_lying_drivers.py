"""A driver that breaks its contract takes down its own transfers, not the engine or other drivers."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from loopback import CURRENT, compile_driver, offered

from mooncake_transfer import RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.errors import DriverUnavailable, TransferError, TransferTimeout
from mooncake_transfer.log_format import fields_of
from mooncake_transfer.region import Region
from mooncake_transfer.testing.fixtures import wait_until

LENGTH = 1 << 20
ROWS = [[offset, offset, 4096] for offset in range(0, LENGTH, 4096)]
WAIT_S = 10.0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_driver(tmp_path_factory.mktemp("lies"), CURRENT)


def config(lie: str, *others: str) -> TransferConfig:
    return TransferConfig(drivers=("loopback", *others), driver_options={"loopback": {"lie": lie}})


@contextmanager
def two_engines(lie: str, *others: str) -> Iterator[tuple[TransferEngine, Region, RemoteRegion, Region]]:
    """A user, its memory, and the memory of an owner that it may use."""
    with TransferEngine(config(lie, *others)) as owner, TransferEngine(config(lie, *others)) as user:
        theirs = owner.allocate(LENGTH)
        theirs.view()[:] = b"\x5a" * LENGTH
        yield user, user.allocate(LENGTH), user.import_region(theirs.descriptor()), theirs


@pytest.mark.parametrize("lie", ["unknown cookie", "twice", "too many polled", "too many accepted"])
def test_completions_of_nothing_are_found_out_and_harm_nobody(
    lie: str, library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    with offered(library), two_engines(lie) as (user, ours, remote, _):
        for _ in range(3):
            ours.view()[:] = bytes(LENGTH)
            user.read(ours, remote, ROWS).wait(timeout_s=WAIT_S)
            assert bytes(ours.view()) == b"\x5a" * LENGTH
        assert user.stats()["loopback"]["faults"] > 0
        if lie in ("unknown cookie", "twice"):
            deadline = time.monotonic() + WAIT_S
            while "driver fault: loopback" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            assert "completed an operation that it does not have" in caplog.text
            told = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert len(told) <= 2, "once for each engine, not for each completion"


def test_what_a_driver_did_wrong_is_among_the_metrics(library: ctypes.CDLL) -> None:
    metrics = pytest.importorskip("mooncake_transfer.metrics", reason="the extra 'metrics' is not installed")
    with offered(library), two_engines("twice") as (user, ours, remote, _):
        user.read(ours, remote, ROWS).wait(timeout_s=WAIT_S)
        at_least = user.stats()["loopback"]["faults"]
        (found,) = (
            sample
            for family in metrics.EngineCollector(user).collect()
            for sample in family.samples
            if sample.name == "mooncake_transfer_driver_faults_total"
        )
        assert found.labels["driver"] == "loopback"
        assert 0 < at_least <= found.value <= user.stats()["loopback"]["faults"]


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("unknown status", "no reason given"),
        ("endless reason", "x" * 200),
        ("reason of garbage", " wire"),
        ("fewer bytes", "4095 of 4096 bytes were moved"),
    ],
)
def test_an_answer_that_makes_no_sense_fails_the_transfer(
    lie: str, reason: str, library: ctypes.CDLL
) -> None:
    with offered(library), two_engines(lie) as (user, ours, remote, _):
        with pytest.raises(TransferError, match=reason) as caught:
            user.read(ours, remote, [[0, 0, 4096]]).wait(timeout_s=WAIT_S)
        assert "loopback" in str(caught.value)


@pytest.mark.parametrize(
    "lie", ["endless notice", "empty notice", "too many notices", "notice done twice", "notice of many bytes"]
)
def test_notices_that_cannot_be_are_the_drivers_fault_and_harm_nobody(lie: str, library: ctypes.CDLL) -> None:
    with offered(library), two_engines(lie) as (user, ours, remote, theirs):
        owner = theirs._engine
        told: list[bytes] = []
        owner.serve("written", lambda payload, caller: told.append(payload))
        deadline = time.monotonic() + WAIT_S
        while not user.stats()["loopback"]["notices_sent"] and time.monotonic() < deadline:
            user.write(ours, remote, ROWS, notify=("written", b"warm")).wait(timeout_s=WAIT_S)
            if lie == "notice of many bytes" and user.stats()["loopback"]["faults"]:
                break
        user.write(ours, remote, ROWS, notify=("written", b"message")).wait(timeout_s=WAIT_S)

        def faults() -> int:
            return sum(engine.stats()["loopback"]["faults"] for engine in (user, owner))

        while not faults() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert faults() > 0
        assert told.count(b"message") <= 1
        user.connect(owner.address).notify("written", b"over the channel")
        while b"over the channel" not in told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert b"over the channel" in told


def test_another_driver_moves_what_a_lying_one_does_not(library: ctypes.CDLL) -> None:
    with offered(library), two_engines("fewer bytes", "tcp") as (user, ours, remote, _):
        user.read(ours, remote, ROWS).wait(timeout_s=WAIT_S)
        assert bytes(ours.view()) == b"\x5a" * LENGTH


def test_a_driver_that_never_answers_ends_with_the_deadline(library: ctypes.CDLL) -> None:
    started = time.monotonic()
    with (
        offered(library),
        two_engines("silence") as (user, ours, remote, _),
        pytest.raises(TransferTimeout, match="loopback"),
    ):
        user.read(ours, remote, [[0, 0, 4096]], deadline_s=0.2).wait(timeout_s=WAIT_S)
    assert time.monotonic() - started < WAIT_S


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("no endpoint", r"returned no handle from open\(\)"),
        ("no memory", "announces no kind of memory"),
        ("odd alignment", "announces an alignment of 3"),
        ("unheard-of notices", "announces notices of 513 bytes"),
        ("words of garbage", "broken"),
    ],
)
def test_a_driver_that_opens_wrongly_does_not_start(lie: str, reason: str, library: ctypes.CDLL) -> None:
    with offered(library):
        with pytest.raises(DriverUnavailable, match=reason):
            TransferEngine(config(lie))
        # Nor is it left out, as it has options: everything would go another way.
        with pytest.raises(DriverUnavailable, match=reason):
            TransferEngine(TransferConfig(driver_options={"loopback": {"lie": lie}}))


def test_an_address_that_is_too_long_is_the_drivers_fault(library: ctypes.CDLL) -> None:
    with offered(library), pytest.raises(TransferError, match=r"claims \d+ bytes from export_address"):
        TransferEngine(config("endless address"))


def test_a_connection_without_a_handle_is_no_way_to_a_peer(library: ctypes.CDLL) -> None:
    with (
        offered(library),
        pytest.raises(TransferError, match=r"returned no handle from connect\(\)"),
        two_engines("no connection") as (user, ours, remote, _),
    ):
        user.read(ours, remote, [[0, 0, 4096]]).wait(timeout_s=WAIT_S)


@pytest.mark.parametrize(
    ("how", "level", "event", "reason"),
    [
        ("kept apart", logging.WARNING, "rail failed", "the two are kept apart"),
        ("too far", logging.INFO, "rail unused", "not beyond this host"),
        ("no connection", logging.WARNING, "rail failed", "it returned no handle from connect()"),
    ],
)
def test_why_a_driver_does_not_lead_where_another_one_does_is_told_once(
    how: str, level: int, event: str, reason: str, library: ctypes.CDLL, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        offered(library),
        caplog.at_level(logging.INFO, logger="mooncake_transfer.rails"),
        two_engines(how, "tcp") as (user, ours, remote, theirs),
    ):
        again = user.import_region(theirs.descriptor("r"))
        for source in (remote, again):
            transfer = user.read(ours, source, ROWS)
            transfer.wait(timeout_s=WAIT_S)
            assert transfer.bytes_by_driver == {"tcp": LENGTH}
        wait_until(lambda: len(caplog.records) > 0, "it is told")
        peer = remote.peer.address
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().endswith(reason)
    assert fields_of(record) == {"event": event, "peer": peer, "rail": "loopback", "region": theirs.name}
