"""Where whole objects are kept under names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from mooncake_store.tiers.contract import Bytes, TierRoom

__all__ = ["ObjectPlace"]


class ObjectPlace(Protocol):
    """A flat set of objects. Thread-safe. Methods may raise OSError, and block for a while.

    An object appears whole or not at all; who reads one while it is replaced gets the old or the new one.
    """

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        """Have an object that is these bytes, whatever there was. Raises also TierFull."""

    def get(self, name: str, most_bytes: int) -> Bytes | None:
        """All of an object, in memory of its own; None when there is none, or it is larger."""

    def head(self, name: str, nbytes: int) -> Bytes | None:
        """The first ``nbytes`` of an object, or what it has of them; None when there is none."""

    def delete(self, name: str) -> bool:
        """Remove an object; whether there was one."""

    def quarantine(self, name: str) -> None:
        """Have an object not found any more, and keep it for inspection where that is cheap."""

    def names(self) -> Iterator[str]:
        """All objects, in no order."""

    def room(self) -> TierRoom:
        """What is known of its size."""

    def close(self) -> None:
        """Let go of connections."""
