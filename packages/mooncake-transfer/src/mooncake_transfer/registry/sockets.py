"""Ends what a thread waits for on its connections, from another thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref

__all__ = ["Sockets"]


class Sockets:
    """The connections of a client, as long as it has them. Thread-safe."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether ``end`` was called."""
        return self._ended

    def add(self, connection: socket.socket) -> None:
        """Remember a new one; it ends at once if the others did."""
        with self._lock:
            self._open.add(connection)
            if self._ended:
                _shut_down(connection)

    def end(self) -> None:
        """Let every wait on them, now or later, end at once with an error or the end of the stream.

        They stay open until the client closes them. A thread that is about to wait does so for a number,
        which after a close may be that of another file, on which it would wait as long as its timeout.
        """
        with self._lock:
            self._ended = True
            for connection in list(self._open):
                _shut_down(connection)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
