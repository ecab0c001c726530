"""The peers an engine is connected to: one for each address, as long as the connection stands."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from mooncake_transfer._errors import PeerUnreachable

if TYPE_CHECKING:
    from mooncake_transfer.peer import Peer


class Peers:
    """Makes one connection to an address, however many threads ask; keeps no peer that is gone. Thread-safe.

    Nothing tells when a connection that this engine made ends. So those that are gone are looked for whenever
    another one is made, or somebody looks at all of them: no more pile up than were alive at once.

    Attributes:
        on_forget: is called with each peer that is kept no longer, so that nobody else keeps it either.
    """

    def __init__(self) -> None:
        self.on_forget: Callable[[Peer], None] = lambda peer: None
        self._lock = threading.Lock()
        self._by_address: dict[str, Peer] = {}
        # Only while somebody connects or waits for who does: each of them refers to the lock, nobody else.
        self._connecting: weakref.WeakValueDictionary[str, threading.Lock] = weakref.WeakValueDictionary()

    def reach(self, address: str, connect: Callable[[float], Peer], limit_s: float) -> Peer:
        """The peer at ``address``, by ``connect(timeout_s)`` when none stands.

        Raises PeerUnreachable when another thread is at it for longer than ``limit_s``, and what ``connect``
        raises.
        """
        with self._lock:
            connecting = self._connecting.setdefault(address, threading.Lock())
        started_s = time.monotonic()
        if not connecting.acquire(timeout=min(max(limit_s, 0.0), threading.TIMEOUT_MAX)):
            raise PeerUnreachable(f"{address} did not answer another thread of this process in {limit_s:g} s")
        try:
            peer = self._by_address.get(address)
            if peer is None or not peer.alive:
                self.forget_lost()
                peer = connect(limit_s - (time.monotonic() - started_s))
                with self._lock:
                    self._by_address[address] = peer
            return peer
        finally:
            connecting.release()

    def forget(self, peer: Peer) -> None:
        """Keep it no longer. Its rails stay for the regions and transfers that refer to them."""
        with self._lock:
            if self._by_address.get(peer.address) is peer:  # else its successor is there
                self._by_address.pop(peer.address, None)
        self.on_forget(peer)
        peer._release_core()

    def forget_lost(self) -> None:
        """Forget those whose connection has ended."""
        with self._lock:
            known = list(self._by_address.values())
        for peer in known:
            if not peer.alive:
                self.forget(peer)

    def clear(self) -> None:
        """Forget all; the engine is closed, perhaps in a forked child, where nobody lets go of the lock."""
        self._by_address.clear()
