"""One value, read piece by piece under one lease."""

from __future__ import annotations

from mooncake_store.keys import Key
from mooncake_store.local_memory import Received, StagingBuffers
from mooncake_store.parts import READ, as_parts, require_inside
from mooncake_store.reader import Reading, missing, require_good

__all__ = ["ValueReader"]


class ValueReader:
    """A value whose bytes stay where they are until :meth:`close`. For one thread at a time.

    What was read is known to be right only when ``close()`` has returned without an error.

    Attributes:
        nbytes: its size.
    """

    def __init__(self, key: Key, reading: Reading, staging: StagingBuffers) -> None:
        """Take the lease. Raises KeyNotFound, KeyInvalid."""
        self._key, self._reading, self._staging = key, reading, staging
        reading.__enter__()
        self._open = True
        if not reading.found[0]:
            self._end()
            raise missing(key)
        self.nbytes = int(reading.sizes[0])

    def read(self, start: int, nbytes: int) -> bytes:
        """``nbytes`` from ``start`` on. Raises SizeMismatch when the value ends before."""
        parts, _ = as_parts([[0, start, 0, nbytes]], READ, 1, nbytes)
        require_inside(parts, self._reading.found, self._reading.sizes, [str(self._key).encode()])
        with Received(nbytes, self._staging) as memory:
            self._reading.fetch_parts(memory, parts)
            return memory.value()

    def close(self) -> None:
        """End the lease. What was read is void when this raises: LeaseExpired where the lease is not known to
        have held until now, KeyNotFound where the value was lost with its owner.
        """
        if self._end():
            require_good(self._reading, self._key)

    def give_up(self) -> None:
        """End the lease; nobody wants to know whether what was read is right. Safe to call at any time."""
        self._end()

    def _end(self) -> bool:
        was_open, self._open = self._open, False
        if was_open:
            self._reading.__exit__(None, None, None)
        return was_open
