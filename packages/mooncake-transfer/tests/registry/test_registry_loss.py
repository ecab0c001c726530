"""A registry that dies, hangs or forgets disturbs nobody, and names come back by themselves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncake_transfer import Region, RemoteRegion, TransferConfig, TransferEngine
from mooncake_transfer.errors import NameUnknown, RegistryError, RegistryUnavailable
from mooncake_transfer.testing.fixtures import wait_until
from mooncake_transfer.testing.registry_servers import RegistryServer, metadata_server

TTL_S = 4.0
TIMEOUT_S = 3.0
# What a question may take: two tries of a step, and a machine that is busy.
PATIENCE_S = 2 * TIMEOUT_S + 6.0
BLOCK = 64 * 1024


def named(url: str, name: str = "") -> TransferConfig:
    return TransferConfig(registry=url, name=name, registry_ttl_s=TTL_S, registry_timeout_s=TIMEOUT_S)


def finds(engine: TransferEngine, name: str) -> bool:
    try:
        engine.connect(name, timeout_s=1.0)
    except RegistryError:
        return False
    return True


def finds_region(engine: TransferEngine, path: str) -> bool:
    try:
        engine.find_region(path, timeout_s=1.0)
    except RegistryError:
        return False
    return True


@contextmanager
def moving(engine: TransferEngine, local: Region, remote: RemoteRegion) -> Iterator[list[int]]:
    """Read block after block meanwhile; yields how many were read, and fails if one was not."""
    stop = threading.Event()
    done = [0]
    failures: list[Exception] = []

    def move() -> None:
        try:
            while not stop.wait(0.001):
                engine.read(local, remote, [[0, 0, BLOCK]]).wait(5.0)
                done[0] += 1
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=move)
    thread.start()
    try:
        yield done
    finally:
        stop.set()
        thread.join(10.0)
    assert not failures


def goes_on(done: list[int]) -> None:
    seen = done[0]
    wait_until(lambda: done[0] >= seen + 5, "transfers go on")


def test_transfers_go_on_while_the_registry_dies_and_names_come_back_to_an_empty_one(
    server: RegistryServer,
) -> None:
    with TransferEngine(named(server.url, "owner")) as owner, TransferEngine(named(server.url)) as reader:
        region, local = owner.allocate(BLOCK, name="kv"), reader.allocate(BLOCK)
        owner.publish(region)
        remote, peer = reader.find_region("owner/kv"), reader.connect("owner")
        with moving(reader, local, remote) as done:
            goes_on(done)
            server.kill()
            with pytest.raises(RegistryUnavailable, match="check that it runs"):
                reader.connect("somebody-new")
            # What is known already is found without it.
            assert reader.connect("owner") is peer
            assert reader.find_region("owner/kv").name == "kv"
            goes_on(done)
            server.start()
            with TransferEngine(named(server.url)) as newcomer:
                wait_until(lambda: finds(newcomer, "owner"), "the name is back", timeout_s=30.0)
                wait_until(lambda: finds_region(newcomer, "owner/kv"), "the region is back", timeout_s=30.0)
                with pytest.raises(NameUnknown):
                    newcomer.connect("somebody-new")
            goes_on(done)


def test_a_registry_that_hangs_holds_nobody_up_for_long(server: RegistryServer) -> None:
    with TransferEngine(named(server.url, "owner")) as owner, TransferEngine(named(server.url)) as reader:
        region, local = owner.allocate(BLOCK, name="kv"), reader.allocate(BLOCK)
        owner.publish(region)
        remote = reader.find_region("owner/kv")
        server.pause()
        with moving(reader, local, remote) as done:
            started_s = time.monotonic()
            with pytest.raises(RegistryUnavailable):
                reader.connect("somebody-new")
            assert time.monotonic() - started_s < PATIENCE_S
            goes_on(done)
            started_s = time.monotonic()
            with TransferEngine(named(server.url, "late")) as late:
                late.publish(late.allocate(4096, name="r"))
            assert time.monotonic() - started_s < 3 * PATIENCE_S
            server.resume()
            with TransferEngine(named(server.url)) as newcomer:
                wait_until(lambda: finds(newcomer, "owner"), "the name is back", timeout_s=30.0)
            goes_on(done)


def test_an_engine_starts_without_its_registry_warns_once_and_is_announced_when_it_comes_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    server = metadata_server(tmp_path)
    with TransferEngine(named(server.url, "early")) as early:
        early.publish(early.allocate(4096, name="r"))
        announcer = early._directory._announcer
        assert announcer is not None
        wait_until(lambda: announcer._failures >= 3, "it tries again and again")
        with server, TransferEngine(named(server.url)) as reader:
            wait_until(lambda: finds_region(reader, "early/r"), "it is announced", timeout_s=30.0)
            assert finds(reader, "early")
            messages = [record.message for record in caplog.records if "mooncake_transfer" in record.name]
    assert sum("is not announced for now" in message for message in messages) == 1
    assert sum("answers again" in message for message in messages) == 1


def test_closing_an_engine_whose_registry_is_gone_is_prompt(tmp_path: Path) -> None:
    with metadata_server(tmp_path) as server:
        engine = TransferEngine(named(server.url, "e"))
        server.kill()
        started_s = time.monotonic()
        engine.close()
        assert time.monotonic() - started_s < PATIENCE_S


def test_a_peer_that_lost_its_connection_is_reached_again_without_the_registry(tmp_path: Path) -> None:
    with (
        metadata_server(tmp_path) as server,
        TransferEngine(named(server.url, "owner")) as owner,
        TransferEngine(named(server.url)) as reader,
    ):
        first = reader.connect("owner")
        server.kill()
        first.close()
        wait_until(lambda: not first.alive, "the connection has ended")
        again = reader.connect("owner")
        assert again is not first
        assert again.epoch == owner.epoch
