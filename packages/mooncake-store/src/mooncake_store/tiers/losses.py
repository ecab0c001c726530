"""What has left the tiers of an owner by itself, until the master has been told."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from mooncake_store.tiers.contract import Tier

__all__ = ["Loss", "Losses"]

# Of one record: digest, and (epoch, version).
Loss = tuple[bytes, tuple[int, int]]


class Losses:
    """News that must not get lost: a record that only the master believes in can be neither read nor put
    again. Thread-safe.
    """

    def __init__(self, most: int) -> None:
        """``most``: how many are kept; with more, the owner has to name what is there instead."""
        self._most = most
        self._lock = threading.Lock()
        self._of_tiers: dict[int, tuple[Tier, list[Loss]]] = {}
        self._count = 0
        self._too_many = False

    def __len__(self) -> int:
        return self._count

    def note(self, tier: Tier, gone: Iterable[Loss]) -> None:
        """These are not there any more."""
        gone = list(gone)
        with self._lock:
            self._count += len(gone)
            if self._count > self._most:
                self._of_tiers, self._count, self._too_many = {}, 0, True
            else:
                self._of_tiers.setdefault(id(tier), (tier, []))[1].extend(gone)

    def take(self) -> list[tuple[Tier, list[Loss]]]:
        """All that there are. Who cannot tell them notes them again."""
        with self._lock:
            taken = list(self._of_tiers.values())
            self._of_tiers, self._count = {}, 0
        return taken

    def take_overflow(self) -> bool:
        """Whether some were thrown away since this was last asked, as there were too many."""
        with self._lock:
            overflow, self._too_many = self._too_many, False
        return overflow
