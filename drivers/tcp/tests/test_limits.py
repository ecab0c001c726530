"""What an endpoint bears: strangers, a descriptor limit, connections without end."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op
from mooncake_transfer import TransferEngine
from mooncake_transfer.testing.fixtures import wait_until

DEADLINE_S = 10.0
CYCLES = 1000
DESCRIPTORS = Path("/proc/self/fd")

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]


def test_strangers_beyond_the_limit_are_dropped_until_there_is_room(
    start: Start, address_of: AddressOf
) -> None:
    address = address_of(start(max_strangers=2))
    with Client(address.port) as first, Client(address.port) as second:
        # Both are known to the endpoint before the third comes: accepted in order.
        with Client(address.port) as third:
            assert third.is_dropped()
        assert first.greet(address.nonce) == Frame(Op.WELCOME)  # and is no stranger any more
        with Client(address.port) as fourth:
            assert fourth.greet(address.nonce) == Frame(Op.WELCOME)
        assert second.greet(address.nonce) == Frame(Op.WELCOME)


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[], None]]:
    """Make this process run out of descriptors, until the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def limit() -> None:
        lowest = os.dup(0)  # the lowest free number, of which there is then none below the limit
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_endpoint_without_descriptors_waits_idly_and_recovers(
    engine: TransferEngine, address_of: AddressOf, few_descriptors: Callable[[], None]
) -> None:
    address = address_of(engine)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(4)]
        few_descriptors()
        for one in sockets:
            one.settimeout(DEADLINE_S)
            one.connect(("127.0.0.1", address.port))  # the kernel accepts, the endpoint cannot
            one.sendall(Frame(Op.HELLO, key=address.nonce).packed())
        spent = time.process_time()
        sockets[-1].settimeout(0.5)
        with pytest.raises(TimeoutError):
            sockets[-1].recv(64)
        assert time.process_time() - spent < 0.25, "it looks for descriptors all the time"
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in sockets:
            one.settimeout(DEADLINE_S)
            assert Frame.unpacked(one.recv(64)) == Frame(Op.WELCOME)


def test_a_thousand_connections_leave_nothing(engine: TransferEngine, address_of: AddressOf) -> None:
    def descriptors() -> int:
        return len([*DESCRIPTORS.iterdir()])

    address = address_of(engine)
    before, grown = descriptors(), 0
    for cycle in range(CYCLES):
        with Client(address.port) as client:
            client.send(Frame(Op.HELLO, region=cycle % 5, offset=cycle, key=address.nonce))
            assert client.answer() == Frame(Op.WELCOME)
        if cycle == CYCLES // 2:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wait_until(lambda: descriptors() <= before, "every connection is closed")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    assert grown < 8 << 10, "KiB; a stream that stays is 70 KiB, 500 of them 35 MiB"
