"""Nonsense to an endpoint that listens: a short run. The long one, for both sides, is wire_fuzz.cpp."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from mooncake_driver_tcp.testing import Address, Client, Frame, Op
from mooncake_transfer import TransferEngine

NBYTES = 4096
CONNECTIONS = 60
FRAMES = 40
MEMBERS = ("op", "flags", "seq", "region", "offset", "length", "version")
EDGES = (0, 1, NBYTES, NBYTES + 1, (1 << 30) + 1, 1 << 63, (1 << 64) - 1)


def mutated(frame: Frame, dice: random.Random) -> Frame:
    """Change up to two members of a frame to numbers that make no sense, or to others that do."""
    for name in dice.sample(
        ("op", "flags", "seq", "region", "offset", "length", "version"), dice.randrange(3)
    ):
        limit = {"op": 255, "flags": 65535, "version": 3}.get(name, (1 << 64) - 1)
        frame = replace(frame, **{name: min(dice.choice(EDGES), limit)})  # type: ignore[arg-type]
    return frame


@pytest.mark.parametrize("seed", range(3))
def test_malformed_frames_end_their_connection_and_nothing_else(
    engine: TransferEngine, address_of: Callable[[TransferEngine], Address], seed: int
) -> None:
    dice = random.Random(seed)
    address, region = address_of(engine), engine.allocate(NBYTES)
    number = msgspec.msgpack.decode(region.descriptor())[4]
    good = Frame(Op.READ, region=number, key=region.key, length=64)
    hello = Frame(Op.HELLO, key=address.nonce)
    for _ in range(CONNECTIONS):
        words = bytearray((mutated(hello, dice) if dice.random() < 0.1 else hello).packed())
        for seq in range(1, FRAMES):
            frame = mutated(replace(good, op=dice.choice((Op.READ, Op.WRITE)), seq=seq), dice)
            words += frame.packed() + bytes(dice.randrange(100) if frame.op == Op.WRITE else 0)
        with Client(address.port) as client, contextlib.suppress(ConnectionError):
            client.socket.sendall(words)
    with Client(address.port) as client:
        assert client.greet(address.nonce) == Frame(Op.WELCOME)
        client.send(replace(good, seq=1))
        assert client.answer() == Frame(Op.READ_DATA, seq=1, length=64)
