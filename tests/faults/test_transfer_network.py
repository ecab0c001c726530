"""Networks that stall, lose, delay, spoil and go away: transfers end in time, and go on when it is over."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from mooncake_transfer import Region, RemoteRegion, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferError, TransferTimeout
from mooncake_transfer.testing import FaultProxy, PeerProcess, PeerProcessError, proxied_config
from mooncake_transfer.testing.fixtures import bytes_of, wait_until
from mooncake_transfer.testing.namespaces import NetworkPair, NetworkUnavailable
from mooncake_transfer.testing.owner import OwnedRegion
from mooncake_transfer.testing.pattern import digest, pattern

NBYTES = 8 << 20
ALL = [[0, 0, NBYTES]]
DEADLINE_S = 20.0
# What a driver may take to see that a peer is silent, beside what the test set it to.
NOTICE_S = 10.0
# The causes that messages are to have, in the words of whoever notices first.
ENDED = r"[Cc]onnection (was )?(reset|refused)|Broken pipe|closed the connection"
WAITS = r"bytes were moved, the rest waits for "
QUICK = {"connect_timeout_ms": 1000, "dead_peer_timeout_ms": 1000}

both_ways = pytest.mark.parametrize("direction", ["read", "write"])


@dataclass
class Way:
    """An engine, a region of another one behind two proxies, and local memory."""

    channel: FaultProxy
    data: FaultProxy
    engine: TransferEngine
    owner: TransferEngine
    local: Region
    owned: Region
    remote: RemoteRegion

    def begin(self, direction: str) -> Transfer:
        move = self.engine.read if direction == "read" else self.engine.write
        return move(self.local, self.remote, ALL)

    def check_works(self) -> None:
        """Within the deadline, bytes move again, the right ones and both ways."""
        until = time.monotonic() + DEADLINE_S
        while True:
            try:
                bytes_of(self.local)[:] = pattern(5, NBYTES)
                self.begin("write").wait(NOTICE_S)
                assert digest(bytes_of(self.owned)) == digest(pattern(5, NBYTES))
                bytes_of(self.local)[:] = 0
                self.begin("read").wait(NOTICE_S)
                assert np.array_equal(bytes_of(self.local), pattern(5, NBYTES))
                return
            except PeerUnreachable:
                if time.monotonic() > until:
                    raise


@pytest.fixture
def way() -> Iterator[Way]:
    config = TransferConfig(drivers=("tcp",), driver_options={"tcp": QUICK})
    with (
        FaultProxy() as channel,
        FaultProxy() as data,
        TransferEngine(proxied_config(channel, data, tcp=QUICK)) as owner,
        TransferEngine(config) as engine,
    ):
        owned, local = owner.allocate(NBYTES), engine.allocate(NBYTES)
        remote = engine.import_region(owned.descriptor())
        way = Way(channel, data, engine, owner, local, owned, remote)
        way.begin("read").wait(DEADLINE_S)
        assert data.forwarded_bytes >= NBYTES
        yield way


def check_names(error: TransferError, way: Way, cause: str) -> None:
    """Who, by which driver, and why: the cause as a pattern."""
    text = str(error)
    assert way.owner.address in text
    assert "tcp" in text
    assert re.search(cause, text)


@both_ways
def test_a_half_open_connection_holds_nobody_beyond_his_deadline(way: Way, direction: str) -> None:
    way.data.throttle(NBYTES)  # a second for all of it
    transfer = way.begin(direction)
    wait_until(lambda: transfer.bytes_done > 0 or way.data.forwarded_bytes > NBYTES * 1.1, "it moves")
    way.data.stall()
    began = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        transfer.wait(0.3)
    assert time.monotonic() - began < 0.3 + NOTICE_S
    check_names(caught.value, way, WAITS)
    assert transfer.done()
    way.data.heal()
    way.check_works()


@both_ways
def test_a_peer_whose_way_ends_and_lets_nobody_in_is_given_up_before_any_deadline(
    way: Way, direction: str
) -> None:
    """Its connections are ended and new ones turned away, which the driver is told at once."""
    way.data.cut()
    with pytest.raises(PeerUnreachable) as caught:
        way.begin(direction).wait(DEADLINE_S)
    check_names(caught.value, way, ENDED)
    way.data.heal()
    way.check_works()


@both_ways
@pytest.mark.parametrize("fault", ["reset", "cut"])
def test_a_connection_that_ends_in_the_middle_is_made_anew(way: Way, direction: str, fault: str) -> None:
    way.data.throttle(NBYTES)
    transfer = way.begin(direction)
    seen = way.data.forwarded_bytes
    wait_until(lambda: way.data.forwarded_bytes > seen + (1 << 20), "it moves")
    getattr(way.data, fault)()
    way.data.throttle(0)
    try:
        transfer.wait(DEADLINE_S)  # the engine may have gone on over a new connection
    except PeerUnreachable as error:
        check_names(error, way, ENDED)
    way.data.heal()
    way.check_works()


def test_spoilt_bytes_crash_nobody_and_stop_nothing(way: Way) -> None:
    """TCP checks what it carries; here something behind it spoils frames. Any outcome but a hang will do."""
    for round_ in range(12):
        way.data.corrupt(chunks=1 + round_ % 3)
        blocks = np.array([[at, at, 4096] for at in range(0, NBYTES, NBYTES // 64)], np.uint64)
        move = way.engine.read if round_ % 2 else way.engine.write
        with contextlib.suppress(TransferError):
            move(way.local, way.remote, blocks).wait(DEADLINE_S)
    way.data.heal()
    # A key that was spoilt on its way was refused, which a driver may remember of an imported region.
    way.remote = way.engine.import_region(way.owned.descriptor())
    way.check_works()


def test_a_slow_network_is_cancelled_at_once(way: Way) -> None:
    way.data.throttle(NBYTES / 60)
    transfer = way.begin("read")
    transfer.cancel()
    began = time.monotonic()
    with pytest.raises(TransferError):
        transfer.wait(DEADLINE_S)
    assert time.monotonic() - began < 5.0
    way.data.heal()
    way.check_works()


def test_a_channel_that_stalls_leaves_transfers_alone(way: Way) -> None:
    """Bytes do not need the channel; who asks something over it gets his answer or a timeout."""
    way.channel.stall()
    way.check_works()
    began = time.monotonic()
    with pytest.raises(TransferError) as caught:
        way.remote.peer.call("nobody", b"", timeout_s=0.3)
    assert time.monotonic() - began < NOTICE_S
    assert way.owner.address in str(caught.value)
    way.channel.heal()


# ---- a network of its own


@pytest.fixture
def network() -> Iterator[NetworkPair]:
    try:
        network = NetworkPair(seed=7)
    except NetworkUnavailable as error:
        pytest.skip(str(error))
    with network:
        yield network


@pytest.fixture
def ends(network: NetworkPair) -> Iterator[list[PeerProcess]]:
    """An engine at each end of the wire."""

    def start(end: int) -> PeerProcess:
        config = TransferConfig(drivers=("tcp",), host=network.addresses[end], driver_options={"tcp": QUICK})
        return PeerProcess(config, prefix=network.inside(end))

    with start(0) as near, start(1) as far:
        yield [near, far]


def check_write(ends: list[PeerProcess], target: OwnedRegion, source: OwnedRegion, seed: int) -> None:
    """Write a region of the near end to one of the far end and look what arrived."""
    near, far = ends
    near.fill(source.number, seed)
    near.write(source.number, target.descriptor, [[0, 0, SMALL]], DEADLINE_S)
    assert far.digest(target.number) == digest(pattern(seed, SMALL))


SMALL = 256 << 10
VANISHING = 32 << 20


def test_bytes_arrive_over_a_long_and_lossy_wire(network: NetworkPair, ends: list[PeerProcess]) -> None:
    """1 % of the packets lost, 50 ms each way."""
    source, target = ends[0].allocate(SMALL, 1), ends[1].allocate(SMALL, 2)
    network.wire(delay_s=0.05, loss=0.01)
    for seed in range(3, 23):
        began = time.monotonic()
        check_write(ends, target, source, seed)
        assert time.monotonic() - began > 0.1
        if seed > 3 and network.lost_packets:
            return
    pytest.fail("20 writes over a wire that loses 1 % of its packets, and none was lost")


@pytest.mark.parametrize("how", ["interface", "cable"])
def test_a_link_that_was_down_is_used_again(network: NetworkPair, ends: list[PeerProcess], how: str) -> None:
    """While it is down, writes end as unreachable or by their deadline; when it is up again, they work."""
    source, target = ends[0].allocate(SMALL, 1), ends[1].allocate(SMALL, 2)
    check_write(ends, target, source, 3)
    network.link(0, up=False) if how == "interface" else network.cut()
    began = time.monotonic()
    with pytest.raises(PeerProcessError) as caught:
        ends[0].write(source.number, target.descriptor, [[0, 0, SMALL]], 2.0)
    assert caught.value.kind in {"PeerUnreachable", "TransferTimeout"}
    assert network.addresses[1] in str(caught.value)
    assert time.monotonic() - began < 2.0 + NOTICE_S
    network.link(0, up=True) if how == "interface" else network.plug()

    def works() -> bool:
        try:
            check_write(ends, target, source, 4)
        except PeerProcessError as error:
            if error.kind not in {"PeerUnreachable", "TransferTimeout"}:
                raise
            return False
        return True

    wait_until(works, "the link is used again", 2 * DEADLINE_S)


@both_ways
@pytest.mark.parametrize("when", ["before", "under way"])
def test_a_peer_that_vanished_without_a_word_is_given_up_by_the_drivers_own_timeout(
    network: NetworkPair, ends: list[PeerProcess], direction: str, when: str
) -> None:
    """No FIN, no RST, no answer to anything: only ``dead_peer_timeout_ms`` (1 s here) can end it so soon."""
    near, far = ends
    source, target = near.allocate(VANISHING, 1), far.allocate(VANISHING, 2)
    move = near.begin_write if direction == "write" else near.begin_read
    move(source.number, target.descriptor, [[0, 0, SMALL]], DEADLINE_S)
    near.answer()  # the connections are made
    if when == "before":
        network.cut()
    else:
        network.wire(delay_s=0.05)  # so that it takes a while
    before = network.carried_bytes
    began = time.monotonic()
    move(source.number, target.descriptor, [[0, 0, VANISHING]], 3 * DEADLINE_S)
    if when == "under way":
        wait_until(lambda: network.carried_bytes > before + VANISHING // 16, "it moves")
        network.cut()
        began = time.monotonic()
    with pytest.raises(PeerProcessError) as caught:
        near.answer(2 * DEADLINE_S)
    took_s = time.monotonic() - began
    assert caught.value.kind == "PeerUnreachable", caught.value
    assert network.addresses[1] in str(caught.value)
    assert "tcp" in str(caught.value)
    # The timeout, up to 3 s for probes of a side that only waits, and 1 s for each attempt to connect anew.
    assert 0.5 < took_s < 15.0, f"{took_s:.1f} s: {caught.value}"
