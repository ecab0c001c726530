"""What a registry has to do: keep small entries that vanish when nobody renews them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

__all__ = ["Interruptible", "Registry"]


class Registry(Protocol):
    """A table of short-lived entries, shared by engines. Thread-safe.

    Calls raise RegistryUnavailable when they got no answer or were refused; ``replace`` may then have
    happened or not. ``open_registry`` gives one whose calls end at the ``timeout_s`` it was opened with,
    however long those of the implementation take; one that is Interruptible leaves no thread behind then.
    An implementation connects when it is first used and again after a loss, by itself.

    Attributes:
        where: its URL as messages show it, without the password.
    """

    where: str

    def get(self, key: str) -> bytes | None:
        """The value of ``key``, or None when there is none."""

    def list(self, prefix: str) -> dict[str, bytes]:
        """Every entry whose key starts with ``prefix``."""

    def replace(self, key: str, old: bytes | None, new: bytes, ttl_s: float) -> bool:
        """Put ``new`` in the place of ``old`` (None: there must be no entry) in one step, for ``ttl_s``.

        Nothing changes, and the answer is False, when the value is not ``old``.
        """

    def renew(self, entries: Mapping[str, bytes], ttl_s: float) -> set[str]:
        """Keep entries for another ``ttl_s``; the keys that no longer have the given value are returned."""

    def remove(self, entries: Mapping[str, bytes]) -> None:
        """Remove the entries that still have the given value."""

    def close(self) -> None:
        """Give connections back. Entries stay until they expire. Safe to call twice."""


@runtime_checkable
class Interruptible(Protocol):
    """A registry whose question in progress can be ended from another thread."""

    def interrupt(self) -> None:
        """Make a call that is in progress raise soon. Nothing but ``close`` is called afterwards."""
