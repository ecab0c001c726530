"""What was posted behind a doorbell is rung for, whatever comes after it."""

from __future__ import annotations

import ctypes
import secrets

from fabric_double import double
from table import OK, REFUSED, WRITE, Endpoint, op

NBYTES = 1 << 16
KEY = secrets.token_bytes(16)


def test_a_write_before_one_that_is_refused_is_rung_for() -> None:
    """The second of a batch, which would ring for the first, never reaches the fabric."""
    library = double()
    options = {"library": library._name, "domain": "double0"}
    source, place = bytearray(secrets.token_bytes(2 * NBYTES)), bytearray(NBYTES)
    with Endpoint(**options) as initiator, Endpoint(**options) as target:
        local = initiator.register(source, 1, secrets.token_bytes(16))
        target.register(place, 2, KEY)
        connection = initiator.connect(target)
        names = connection, local, initiator.import_key(connection, 2, KEY, 2 * NBYTES)
        initiator.submit([op(WRITE, *names, (0, 0, 64), 1)])
        assert initiator.finish(1) == {1: OK}
        library.double_doorbells.restype = library.double_posted.restype = ctypes.c_uint64
        rung, posted = library.double_doorbells(), library.double_posted()
        beyond = op(WRITE, *names, (NBYTES, NBYTES, 64), 3)
        initiator.submit([op(WRITE, *names, (64, 64, 64), 2), beyond])
        assert library.double_posted() > posted
        assert library.double_doorbells() > rung
        assert initiator.finish(2) == {2: OK, 3: REFUSED}
    assert place[:128] == source[:128]
