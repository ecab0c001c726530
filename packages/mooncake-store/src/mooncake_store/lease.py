"""Promises with a deadline: leases of readers and reservations of writers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mooncake_store.catalog import StoredObject

__all__ = ["Grant", "GrantTable"]


@dataclass(slots=True, eq=False)
class Grant:
    """What a client was promised about some objects, in the order it named them, until ``deadline_s``."""

    id: int
    client: int
    objects: list[StoredObject]
    deadline_s: float


class GrantTable:
    """Grants of one kind, which all live equally long unless renewed. Not thread-safe; times are the
    caller's.
    """

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self._grants: OrderedDict[int, Grant] = OrderedDict()  # earliest deadline first
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, client: int, objects: list[StoredObject], now_s: float) -> Grant:
        """Promise something anew. Ids are never used again."""
        self._last_id += 1
        grant = Grant(self._last_id, client, objects, now_s + self.ttl_s)
        self._grants[grant.id] = grant
        return grant

    def renew(self, grant_id: int, client: int, now_s: float) -> bool:
        """Let a grant of the client live for another full time; False when it has none of this id."""
        grant = self._grants.get(grant_id)
        if grant is None or grant.client != client:
            return False
        grant.deadline_s = now_s + self.ttl_s
        self._grants.move_to_end(grant_id)
        return True

    def take(self, grant_id: int, client: int) -> Grant | None:
        """End a grant of the client and return it; None when it has none of this id."""
        grant = self._grants.get(grant_id)
        if grant is None or grant.client != client:
            return None
        return self._grants.pop(grant_id)

    def take_all(self, client: int) -> list[Grant]:
        """End every grant of a client."""
        return [self._grants.pop(g.id) for g in list(self._grants.values()) if g.client == client]

    def take_expired(self, now_s: float) -> list[Grant]:
        """End the grants whose deadline has passed."""
        expired = []
        while self._grants:
            grant = next(iter(self._grants.values()))
            if grant.deadline_s > now_s:
                break
            expired.append(self._grants.pop(grant.id))
        return expired

    @property
    def first_deadline_s(self) -> float | None:
        """When the next grant expires; None when there is none."""
        return next((g.deadline_s for g in self._grants.values()), None)

    @property
    def last_deadline_s(self) -> float | None:
        """When the last grant expires; None when there is none."""
        return next((g.deadline_s for g in reversed(self._grants.values())), None)
