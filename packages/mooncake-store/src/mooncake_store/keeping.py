"""How long values stay, and which there are: the calls of a store that move no bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from mooncake_store import protocol
from mooncake_store._errors import ConfigError, KeyNotFound
from mooncake_store.batch import Batch, as_bools
from mooncake_store.config import StoreConfig
from mooncake_store.keys import Key
from mooncake_store.listing import Listing
from mooncake_store.membership import Membership

__all__ = ["Keeping"]

MISSING = 2**64 - 1
REMOVED_AT_ONCE = 4096


class Keeping:
    """Base of Store."""

    config: StoreConfig
    _member: Membership
    _listing: Listing

    def pin(self, key: Key, *, soft_s: float | None = None) -> None:
        """Keep a value: until ``unpin`` or ``remove``, or for ``soft_s`` seconds while others can go instead.

        Raises KeyNotFound, KeyInvalid, ConfigError.
        """
        if not self.batch_pin([key], soft_s=soft_s)[0]:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it cannot be pinned")

    def batch_pin(self, keys: Sequence[Key], *, soft_s: float | None = None) -> list[bool]:
        """Pin many, as :meth:`pin`; per key, whether it is there."""
        if soft_s is not None and not soft_s > 0:
            raise ConfigError(f"soft_s is {soft_s}; it must be a positive number of seconds, or None")
        digests = Batch(self.config.tenant, keys).packed
        found = self._member.ask(protocol.Pin(digests=digests, soft_pin_s=soft_s), protocol.Found).found
        return as_bools(found)

    def unpin(self, key: Key) -> None:
        """End the pins of a value, of both kinds. Raises KeyNotFound, KeyInvalid."""
        if not self.batch_unpin([key])[0]:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it cannot be unpinned")

    def batch_unpin(self, keys: Sequence[Key]) -> list[bool]:
        """Unpin many; per key, whether it is there. Raises KeyInvalid."""
        digests = Batch(self.config.tenant, keys).packed
        return as_bools(self._member.ask(protocol.Unpin(digests=digests), protocol.Found).found)

    def end_session(self, session: str) -> int:
        """Let the values put with ``PutPolicy(session=...)`` be the first to go; how many there are.

        What is pinned stays pinned.
        """
        return self._member.ask(protocol.EndSession(session=session), protocol.Counted).count

    def size(self, key: Key) -> int:
        """Bytes of the value; neither a use nor a lease. Raises KeyNotFound, KeyInvalid."""
        (size,) = self.batch_size([key])
        if size is None:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it has no size")
        return size

    def batch_size(self, keys: Sequence[Key]) -> list[int | None]:
        """Bytes of each value, None for what is not there. Raises KeyInvalid."""
        request = protocol.GetSizes(digests=Batch(self.config.tenant, keys).packed)
        sizes = np.frombuffer(self._member.ask(request, protocol.Sizes).sizes, dtype="<u8").tolist()
        return [None if size == MISSING else size for size in sizes]

    def ls(self, pattern: str = "", *, prefix: Key = "") -> list[tuple[bytes, int]]:
        """Keys of this tenant with the bytes of their values, in no order.

        Args:
            pattern: a regular expression that is found somewhere in the key.
            prefix: what the key begins with; cheaper than a pattern, as owners look for it.

        Keys are asked of the owners of the memory, some at a time: what comes or goes meanwhile may be
        missing, or be listed though it has gone; empty values have no owner and are not listed. Raises
        ConfigError for a pattern that is none, OwnerUnreachable when an owner does not answer.
        """
        try:
            wanted = re.compile(pattern.encode())
        except re.error as error:
            raise ConfigError(f"the pattern {pattern!r} is no regular expression: {error}") from error
        begin = prefix.encode() if isinstance(prefix, str) else bytes(prefix)
        found = {}  # a value in several segments is known to several owners
        for key, nbytes in self._listing.keys(begin):
            if wanted.search(key):
                found[key] = nbytes
        return list(found.items())

    def remove_by_regex(self, pattern: str, *, prefix: Key = "") -> int:
        """Remove the values of this tenant whose keys match, as :meth:`ls` finds them; how many that was."""
        keys, removed = [key for key, _ in self.ls(pattern, prefix=prefix)], 0
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            batch = Batch(self.config.tenant, keys[start : start + REMOVED_AT_ONCE])
            request = protocol.Remove(digests=batch.packed)
            removed += sum(self._member.ask(request, protocol.Found).found)
        return removed

    def remove_all(self) -> int:
        """Remove every value of this tenant; how many that was."""
        return self._member.ask(protocol.RemoveAll(), protocol.Counted).count
