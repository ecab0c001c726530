"""A notice comes after the writes before it, over a fabric that delivers in any order."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest
from fabric_double import double
from table import OK, READ, REFUSED, WRITE, Endpoint, op

CELL, CELLS = 512, 64
NBYTES = CELL * CELLS
KEY = secrets.token_bytes(16)
DEADLINE_S = 30.0


class Pair:
    """An initiator with a source, and a target with a region of the same size."""

    def __init__(self, initiator: Endpoint, target: Endpoint) -> None:
        self.initiator, self.target = initiator, target
        self.source, self.place = bytearray(NBYTES), bytearray(NBYTES)
        self.local = initiator.register(self.source, 1, secrets.token_bytes(16))
        target.register(self.place, 2, KEY)
        self.connection = initiator.connect(target)
        self.remote = initiator.import_key(self.connection, 2, KEY, NBYTES)

    def write_all(self, value: int, first_cookie: int) -> None:
        """Write every cell of the region, one operation each."""
        self.source[:] = bytes([value]) * NBYTES
        names = self.connection, self.local, self.remote
        self.initiator.submit(
            [op(WRITE, *names, (CELL * i, CELL * i, CELL), first_cookie + i) for i in range(CELLS)]
        )

    def next_notice(self) -> bytes:
        """Wait for one at the target."""
        limit = time.monotonic() + DEADLINE_S
        while time.monotonic() < limit:
            if found := self.target.poll_notices():
                assert len(found) == 1
                return found[0]
        pytest.fail(f"no notice within {DEADLINE_S} s")


@pytest.fixture(params=[1, 2, 3])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    library = double()
    library.double_seed(request.param)
    options = {"library": library._name, "domain": "double0"}
    with Endpoint(**options) as initiator, Endpoint(**options) as target:
        pair = Pair(initiator, target)
        # So slow that what a notice has overtaken is still on its way when the test looks.
        library.double_pace_us(300)
        yield pair
        library.double_pace_us(0)


def test_a_notice_comes_once_all_writes_before_it_are_visible(pair: Pair) -> None:
    """With ``Target::deliver`` not looking at ``seen``, it comes before some of them: messages overtake."""
    for value in range(1, 9):
        cookie = 1000 * value
        pair.write_all(value, cookie)
        pair.initiator.notify(pair.connection, b"%d" % value, cookie + CELLS)
        assert pair.next_notice() == b"%d" % value
        assert pair.place == pair.source
        assert set(pair.initiator.finish(CELLS + 1).values()) == {OK}


def test_notices_without_writes_between_them_all_come(pair: Pair) -> None:
    for number in range(40):
        pair.initiator.notify(pair.connection, b"%d" % number, number)
    found: list[bytes] = []
    limit = time.monotonic() + DEADLINE_S
    while len(found) < 40 and time.monotonic() < limit:
        found += pair.target.poll_notices()
    assert sorted(found) == sorted(b"%d" % number for number in range(40))
    assert set(pair.initiator.finish(40).values()) == {OK}


def test_a_notice_after_a_write_that_failed_fails_and_the_next_one_comes(pair: Pair) -> None:
    pair.initiator.notify(pair.connection, b"first", 1)  # from here on, writes are counted
    assert pair.next_notice() == b"first"
    stranger = pair.initiator.import_key(pair.connection, 2, secrets.token_bytes(16), NBYTES)
    names = pair.connection, pair.local
    pair.initiator.submit(
        [op(WRITE, *names, pair.remote, (0, 0, 8), 2), op(WRITE, *names, stranger, (0, 0, 8), 3)]
    )
    pair.initiator.notify(pair.connection, b"second", 4)
    assert pair.initiator.finish(4) == {1: OK, 2: OK, 3: REFUSED, 4: REFUSED}
    pair.initiator.submit([op(READ, *names, pair.remote, (0, 0, 8), 5)])
    pair.initiator.notify(pair.connection, b"third", 6)
    assert pair.next_notice() == b"third"
    assert pair.initiator.finish(2) == {5: OK, 6: OK}
