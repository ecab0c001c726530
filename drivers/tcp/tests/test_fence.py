"""Bytes of writes that failed over one rail never land on those of a later write over another."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mooncake_driver_tcp import plugin
from mooncake_driver_tcp.options import render
from mooncake_transfer import RailConfig, Region, RemoteRegion, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferCancelled, TransferError, TransferTimeout
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, hookimpl
from mooncake_transfer.plugins import driver_plugins
from mooncake_transfer.testing.fixtures import bytes_of, wait_until
from mooncake_transfer.testing.proxy import INNER_HOST, FaultProxy

DEADLINE_S = 10.0
LATE_S = 0.3  # within which bytes that come too late have come
PART = (
    32 << 10
)  # fits the sockets on the way; too little to measure the rail by, so the first one stays first
OLD, NEW = 0xAA, 0xBB
RAILS = "tcp-rails"
PROXIED, DIRECT = "proxied", "direct"
NBYTES = 8 << 20
DIRECT_HOST = "127.0.0.4"
TCP_INFO = struct.Struct("=120xQ")  # tcpi_bytes_acked, of struct tcp_info


class _TwoRails:
    """The plugin of a driver that opens the tcp driver's core twice."""

    def __init__(self, data: FaultProxy) -> None:
        self._data = data

    @hookimpl
    def mooncake_transfer_drivers(self) -> list[DriverInfo]:
        return [
            DriverInfo(
                RAILS,
                frozenset({"dram"}),
                priority=1,
                probe=Available,
                load=plugin.load,
                endpoints=self._endpoints,
            )
        ]

    def _endpoints(self, options: Mapping[str, object]) -> list[EndpointSpec]:
        common = {"dead_peer_timeout_ms": 60_000}
        behind = {"host": INNER_HOST}
        if options["target"]:  # what the proxy forwards to; the other engine only connects
            behind |= {"advertise_host": self._data.host, "port_min": str(self._data.port)}
        return [
            EndpointSpec(PROXIED, render({**common, **behind, "port_min": int(behind.get("port_min", 0))})),
            EndpointSpec(DIRECT, render({**common, "host": DIRECT_HOST})),
        ]


class Writer:
    """An engine that writes to a region of another over both rails, and what each of them holds."""

    def __init__(self, stack: ExitStack, data: FaultProxy, channel: FaultProxy, settings: dict[str, Any]):
        def config(target: bool, **more: Any) -> TransferConfig:
            options = {RAILS: {"target": target}}
            return TransferConfig(drivers=(RAILS,), driver_options=options, **more)

        self.data, self.channel = data, channel
        rails = RailConfig(probe_every=0, suspect_pause_s=30.0)  # a rail that failed is not tried again
        owner = config(True, host=INNER_HOST, advertise_host=channel.host, port=channel.port)
        self.owner = stack.enter_context(TransferEngine(owner))
        self.engine = stack.enter_context(TransferEngine(config(False, rails=rails, **settings)))
        self.owned: Region = self.owner.allocate(NBYTES, prefault=True)
        self.local: Region = self.engine.allocate(NBYTES, prefault=True)
        self.remote: RemoteRegion = self.engine.import_region(self.owned.descriptor())

    def sent_to_proxy(self) -> int:
        """Bytes that the proxied rail's sockets have sent and that are with the proxy's host."""
        total = 0
        for end in sockets_to((self.data.host, self.data.port)):
            total += TCP_INFO.unpack_from(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256))[0]
        return total


def sockets_to(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Copies of this process's connections to an address."""
    for entry in Path("/proc/self/fd").iterdir():
        # Others than sockets must not even be copied: processes live as long as our ends of their pipes.
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as found:
                if found.family == socket.AF_INET and found.getpeername() == address:
                    yield found


@contextmanager
def two_rails(**settings: Any) -> Iterator[Writer]:
    """Both engines, in this process; ``settings``: fields of the writer's TransferConfig."""
    with ExitStack() as stack:
        data, channel = stack.enter_context(FaultProxy()), stack.enter_context(FaultProxy())
        plugins = driver_plugins().manager
        registered = _TwoRails(data)
        plugins.register(registered, name=RAILS)
        stack.callback(plugins.unregister, registered)
        yield Writer(stack, data, channel, settings)


def part(writer: Writer, value: int, **options: Any) -> Transfer:
    bytes_of(writer.local)[:PART] = value
    return writer.engine.write(writer.local, writer.remote, [[0, 0, PART]], **options)


def operations(writer: Writer, device: str) -> int:
    return next(rail.ops for rail in writer.engine.rails() if rail.device == device)


def break_proxied_rail(writer: Writer) -> None:
    """End the writer's own sockets of the rail, as its network would; what they sent stays on its way."""
    ended = 0
    for end in sockets_to((writer.data.host, writer.data.port)):
        end.shutdown(socket.SHUT_RDWR)
        ended += 1
    assert ended > 0


def hold_bytes_on_the_way(writer: Writer) -> Transfer:
    """Post a write whose bytes the proxy holds."""
    before = writer.sent_to_proxy()
    writer.data.stall()
    transfer = part(writer, OLD)
    wait_until(lambda: writer.sent_to_proxy() >= before + PART, "the bytes have left the writer")
    return transfer


def check_nothing_lands(writer: Writer) -> None:
    writer.data.heal()
    until = time.monotonic() + LATE_S
    while time.monotonic() < until:
        assert set(bytes_of(writer.owned)[:PART].tolist()) == {NEW}
        time.sleep(0.01)  # nothing to wait for: it must stay so


@pytest.fixture
def writer() -> Iterator[Writer]:
    with two_rails() as writer:
        part(writer, 1).wait(DEADLINE_S)  # connects, and shows which rail is first
        assert operations(writer, PROXIED) == 1
        yield writer


def test_a_slice_that_is_retried_on_another_rail_leaves_nothing_behind(writer: Writer) -> None:
    moved = hold_bytes_on_the_way(writer)
    break_proxied_rail(writer)
    moved.wait(DEADLINE_S)
    assert set(bytes_of(writer.owned)[:PART].tolist()) == {OLD}
    part(writer, NEW).wait(DEADLINE_S)
    assert operations(writer, PROXIED) == 1
    check_nothing_lands(writer)


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_write_after_one_that_was_given_up_is_safe_on_another_rail(writer: Writer, end: str) -> None:
    given_up = hold_bytes_on_the_way(writer)
    if end == "cancel":
        given_up.cancel()
    with pytest.raises(TransferTimeout if end == "deadline" else TransferCancelled):
        given_up.wait(0.1)
    part(writer, NEW).wait(DEADLINE_S)
    assert operations(writer, PROXIED) == 1
    check_nothing_lands(writer)


def test_a_fence_that_was_asked_for_leaves_the_range_to_others(writer: Writer) -> None:
    given_up = hold_bytes_on_the_way(writer)
    with pytest.raises(TransferTimeout):
        given_up.wait(0.1)
    writer.remote.peer.fence(timeout_s=DEADLINE_S)
    bytes_of(writer.owned)[:PART] = NEW
    check_nothing_lands(writer)


def test_a_connection_imported_anew_is_fenced_from_what_the_one_before_left(writer: Writer) -> None:
    descriptor = writer.owned.descriptor()
    given_up = hold_bytes_on_the_way(writer)
    with pytest.raises(TransferTimeout):
        given_up.wait(0.1)
    del given_up
    writer.channel.reset()
    wait_until(lambda: not writer.remote.peer.alive, "the channel is lost")
    writer.remote.close()
    writer.remote = writer.engine.import_region(descriptor)
    part(writer, NEW).wait(DEADLINE_S)
    check_nothing_lands(writer)


def test_a_lost_channel_is_made_anew_for_the_fence(writer: Writer) -> None:
    moved = hold_bytes_on_the_way(writer)
    writer.channel.reset()
    break_proxied_rail(writer)
    moved.wait(DEADLINE_S)
    part(writer, NEW).wait(DEADLINE_S)
    check_nothing_lands(writer)


def test_a_slice_fails_when_the_fence_is_not_confirmed_in_time() -> None:
    with two_rails(fence_timeout_s=2.0) as writer:
        part(writer, NEW).wait(DEADLINE_S)
        moved = hold_bytes_on_the_way(writer)
        writer.channel.stall()
        break_proxied_rail(writer)
        with pytest.raises(PeerUnreachable, match=r"proxied.*may still reach it.*could not be fenced"):
            moved.wait(DEADLINE_S)
        assert set(bytes_of(writer.owned)[:PART].tolist()) == {NEW}  # it went nowhere else
        writer.channel.heal()
        part(writer, NEW).wait(DEADLINE_S)  # asks again
        check_nothing_lands(writer)


def test_a_target_that_was_restarted_is_an_error_and_never_written_to() -> None:
    with two_rails(fence_timeout_s=2.0) as writer:
        part(writer, 1).wait(DEADLINE_S)
        moved = hold_bytes_on_the_way(writer)
        writer.owner.close()
        with TransferEngine(writer.owner.config) as successor:
            region = successor.allocate(PART)
            bytes_of(region)[:] = NEW
            break_proxied_rail(writer)
            with pytest.raises(TransferError):
                moved.wait(DEADLINE_S)
            with pytest.raises(TransferError):
                part(writer, OLD).wait(DEADLINE_S)
            writer.data.heal()
            assert set(bytes_of(region).tolist()) == {NEW}
