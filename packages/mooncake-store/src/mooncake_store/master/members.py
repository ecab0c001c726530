"""Clients that have joined a master."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOCAL", "Member", "Members"]

LOCAL = 0  # the connection of clients in the master's process


@dataclass(slots=True)
class Member:
    """One client.

    Attributes:
        client: the id it chose for itself.
        connection: incoming connection of the transfer engine it joined over; 0 for one in the master's
            process.
        address: channel of its engine, where notices are announced; empty for one in the master's process.
        heard_s: when its last request came.
        number: what the map calls it; never used again.
        segment: id of the segment it lends, or 0.
        node: its machine, 0 when it is not known.
        reached_at: address of its engine, from wherever it joined.
        secret: known to it and this master.
        tenant: number of the tenant whose keys it names.
        tenant_name: its name.
        adopting: the ledger of its segment is still to come.
        adopted: objects adopted from it.
        minor: of the protocol that it speaks.
        copies: there may be something for it to copy.
        draining: its segment is to become empty.
    """

    client: int
    connection: int
    address: str
    heard_s: float
    number: int = 0
    segment: int = 0
    node: int = 0
    reached_at: str = ""
    secret: bytes = b""
    tenant: int = 0
    tenant_name: str = ""
    adopting: bool = False
    adopted: int = 0
    minor: int = 0
    copies: bool = False
    draining: bool = False


class Members:
    """All clients, by the id they chose and by number. Not thread-safe."""

    def __init__(self) -> None:
        self._by_client: dict[int, Member] = {}
        self._by_number: dict[int, Member] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._by_client)

    @property
    def all(self) -> list[Member]:
        """Every member."""
        return list(self._by_client.values())

    def get(self, client: int) -> Member | None:
        """The member of this id, if it has joined."""
        return self._by_client.get(client)

    def numbered(self, number: int) -> Member | None:
        """The member of this number, if it still is one."""
        return self._by_number.get(number)

    def add(self, member: Member) -> None:
        """Take a member in, and number it; there must be none of its id."""
        assert member.client not in self._by_client, f"client {member.client} has joined already"
        self._last_number += 1
        member.number = self._last_number
        self._by_client[member.client] = self._by_number[member.number] = member

    def remove(self, member: Member) -> None:
        """Let a member go."""
        del self._by_client[member.client]
        del self._by_number[member.number]

    def on_connection(self, connection: int) -> list[Member]:
        """Members that joined over a connection."""
        return [member for member in self._by_client.values() if member.connection == connection]
