"""What an engine asks of the layer that carries its frames, and what that layer tells the engine."""

from __future__ import annotations

from typing import Protocol

from mooncake_ep.pg.wire.frames import Header, Lane
from mooncake_ep.pg.wire.greeting import Address

__all__ = ["LARGEST", "Links", "Receiver"]

LARGEST = 1 << 20  # bytes of a frame of DATA


class Receiver(Protocol):
    """An engine. Called with its lock held, by the thread of the links."""

    def place(self, rank: int, lane: Lane, head: Header) -> memoryview | None:
        """Return where the payload of a frame goes; None: not yet, ask again after `Links.resume`."""

    def arrived(self, rank: int, lane: Lane, head: Header, payload: memoryview) -> None:
        """Take a frame that is whole."""

    def linked(self, rank: int, life: int) -> None:
        """Another process can be sent frames from now on."""

    def lost(self, rank: int) -> None:
        """A process is gone, after all that it sent before was given to `arrived`."""


class Links(Protocol):
    """Connections to the other ranks of a group. Methods are called with the engine's lock held.

    Frames of one lane arrive in the order of `send`; payloads stay the caller's until they have left.
    """

    def send(self, rank: int, lane: Lane, head: bytes, payload: memoryview | bytes = b"") -> None:
        """Send a frame, without waiting. Nothing happens when there is no connection."""

    def resume(self, rank: int | None = None) -> None:
        """Ask again where frames go that had to wait; of one rank, or of all."""

    def cut(self, rank: int) -> None:
        """End the connection, behind what was sent before. Nothing more is told of that process."""

    def abandon(self, sink: memoryview) -> None:
        """Send no more frames of DATA that were given, and have the rest of those that come go to `sink`."""

    def ranks(self) -> list[int]:
        """Return who is connected."""

    def life(self, rank: int) -> int:
        """Return the number of the process that is connected as a rank; 0: none is."""

    def idle(self, rank: int, lane: Lane) -> bool:
        """Whether all that was sent has left this process, or the connection is gone."""

    def silent_s(self, rank: int) -> float:
        """Seconds since anything came from a rank."""

    def pump(self, limit_s: float) -> bool:
        """Take what has come and comes, by the calling thread, once; False when another one does so.

        With the engine's lock held once, which is given up while there is nothing.
        """

    def look(self) -> int:
        """Have this layer look for what has come; returns how often it has done so."""

    def renew(self, life: int) -> None:
        """Greet others as another process from now on; there must be no connection."""

    def connect(self, rank: int, address: Address, deadline: float) -> bool:
        """Connect to a process, unless it is so. Without the engine's lock, which it takes."""

    def address(self) -> Address:
        """Return where this process is reached."""

    def close(self) -> None:
        """End all connections and threads. Without the engine's lock."""
