"""Engines that know no driver but tcp, and clients that speak its wire by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op, parse_address
from mooncake_transfer import RailConfig, TransferConfig, TransferEngine

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start an engine with options of the driver; closed after the test."""
    with ExitStack() as engines:

        def start(**options: str | int) -> TransferEngine:
            # One round: the tests look at what the driver itself says and does.
            config = TransferConfig(
                drivers=("tcp",), driver_options={"tcp": dict(options)}, rails=RailConfig(attempts=1)
            )
            return engines.enter_context(TransferEngine(config))

        yield start


@pytest.fixture
def engine(start: Start) -> TransferEngine:
    return start()


@pytest.fixture
def address_of() -> AddressOf:
    """Where an engine's endpoint listens, as its hello tells peers."""

    def address_of(engine: TransferEngine) -> Address:
        (blob,) = [blob for name, _, blob in engine._core.addresses() if name == "tcp"]
        return parse_address(blob)

    return address_of


@pytest.fixture
def stranger(engine: TransferEngine, address_of: AddressOf) -> Iterator[Client]:
    """Connected, and has not said hello."""
    with Client(address_of(engine).port) as client:
        yield client


@pytest.fixture
def client(engine: TransferEngine, stranger: Client, address_of: AddressOf) -> Client:
    """Connected and welcome."""
    assert stranger.greet(address_of(engine).nonce) == Frame(Op.WELCOME)
    return stranger
