"""A region that peers still use when the time to give it back is over: the error says who they are."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op
from mooncake_transfer import Region, TransferEngine
from mooncake_transfer.errors import RegionBusy
from mooncake_transfer.testing.fixtures import wait_until

NBYTES = 64 << 20  # more than sockets hold

AddressOf = Callable[[TransferEngine], Address]


class Readers:
    """Clients of one region, each with answers that it does not take."""

    def __init__(self, stack: ExitStack, address: Address, region: Region, descriptor: bytes) -> None:
        self.ports: set[str] = set()
        fields = msgspec.msgpack.decode(descriptor)
        read = Frame(Op.READ, seq=1, region=fields[4], key=fields[5], length=NBYTES)
        for _ in range(2):
            client = stack.enter_context(Client(address.port))
            assert client.greet(address.nonce) == Frame(Op.WELCOME)
            client.send(read)
            assert client.answer().length == NBYTES  # it has begun, so it cannot be taken back
            self.ports.add(str(client.socket.getsockname()[1]))

    def check(self, message: str) -> None:
        """Both are counted, or one when the worker of the other was fast, and one of them is named."""
        said = re.search(
            r"(\d) operations of (\d) connections of peers, such as the one from 127.0.0.1:(\d+)", message
        )
        assert said is not None, message
        assert said[1] == said[2]
        assert 1 <= int(said[1]) <= 2
        assert said[3] in self.ports


@pytest.mark.parametrize("way", ["close", "revoke"])
def test_who_still_reads_is_named(engine: TransferEngine, address_of: AddressOf, way: str) -> None:
    def busy_at_once() -> bool:
        """Whether the time was over before a worker could break the connections off, as it does then."""
        with ExitStack() as stack:
            region = stack.enter_context(engine.allocate(NBYTES))
            descriptor = region.descriptor() if way == "close" else region.grant("r")
            readers = Readers(stack, address_of(engine), region, descriptor)
            try:
                region.close(0) if way == "close" else region.revoke(descriptor, 0)
            except RegionBusy as error:
                readers.check(str(error))
                return True
            return False

    wait_until(busy_at_once, "the region is busy when its time is over")
