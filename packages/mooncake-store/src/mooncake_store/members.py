"""Clients that have joined a master, and what each has still to be told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mooncake_store.catalog import StoredObject
from mooncake_store.protocol import Notice

__all__ = ["Member", "Members"]


@dataclass(slots=True)
class Member:
    """One client.

    Attributes:
        client: the id it chose for itself.
        connection: incoming connection of the transfer engine it joined over; 0 for one in the master's
            process.
        address: channel of its engine, where notices are announced; empty for one in the master's process.
        heard_s: when its last request came.
        segment: the segment it lends, or 0.
        unread: notices it has not confirmed yet, oldest first.
        rung: it has been told that there are some.
    """

    client: int
    connection: int
    address: str
    heard_s: float
    segment: int = 0
    unread: deque[Notice] = field(default_factory=deque)
    rung: bool = False


class Members:
    """All clients, and the notices to them. Not thread-safe."""

    def __init__(self) -> None:
        self._by_client: dict[int, Member] = {}
        self._last_number = 0
        self._to_ring: dict[int, Member] = {}

    def __len__(self) -> int:
        return len(self._by_client)

    def get(self, client: int) -> Member | None:
        """The member of this id, if it has joined."""
        return self._by_client.get(client)

    def add(self, member: Member) -> None:
        """Take a member in; there must be none of its id."""
        assert member.client not in self._by_client, f"client {member.client} has joined already"
        self._by_client[member.client] = member

    def remove(self, member: Member) -> None:
        """Let a member go, with what it has not read."""
        del self._by_client[member.client]
        self._to_ring.pop(member.client, None)

    def on_connection(self, connection: int) -> list[Member]:
        """Members that joined over a connection."""
        return [member for member in self._by_client.values() if member.connection == connection]

    def notify(self, client: int, entry: StoredObject) -> None:
        """Note, for a client if it is a member, that a value has gone."""
        member = self._by_client.get(client)
        if member is None:
            return
        self._last_number += 1
        member.unread.append(Notice(self._last_number, entry.digest, entry.key))
        if not member.rung:
            self._to_ring[client] = member

    def read_notices(self, member: Member, seen: int) -> list[Notice]:
        """What the member has to be told, after it has confirmed everything up to number ``seen``."""
        while member.unread and member.unread[0].number <= seen:
            member.unread.popleft()
        member.rung = False
        self._to_ring.pop(member.client, None)
        return list(member.unread)

    def take_to_ring(self) -> list[Member]:
        """Members to be told now that they have notices to fetch. Each is named once until it has fetched
        them.
        """
        members = list(self._to_ring.values())
        self._to_ring.clear()
        for member in members:
            member.rung = True
        return members

    def hopeless(self, silent_since_s: float, max_unread: int) -> list[Member]:
        """Members not heard of since then, or that have left more than ``max_unread`` notices unread."""
        members = self._by_client.values()
        return [m for m in members if m.heard_s < silent_since_s or len(m.unread) > max_unread]
