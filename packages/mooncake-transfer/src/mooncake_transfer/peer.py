"""Another engine, reached by its channel address."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._arguments import called_method, method_name, text
from mooncake_transfer._arguments import payload as payload_of
from mooncake_transfer._core import Channel
from mooncake_transfer._core import Peer as CorePeer
from mooncake_transfer._errors import CallTimeout, PeerUnreachable, RegionRefused, RemoteError

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.region import RemoteRegion
    from mooncake_transfer.transfer import Transfer

__all__ = ["Caller", "Peer"]

REGION_METHOD = "mooncake.region"
CHECKSUM_METHOD = "mooncake.checksums"
FENCE_METHOD = "mooncake.fence"


class Caller(msgspec.Struct, frozen=True):
    """Who asked. ``connection`` is unique within this engine and never used again.

    Attributes:
        connection: the incoming connection the question came on.
        address: the asking engine's own channel address.
        epoch: the asking engine's incarnation.
        certificate: the one that the asking engine has proved to own, signed by the CA of
            ``TransferConfig.tls``, as DER; empty without TLS.
    """

    connection: int
    address: str
    epoch: int
    certificate: bytes = b""


class Peer:
    """One incarnation of another engine. Thread-safe. When it has died, connect anew for its successor.

    Attributes:
        address: ``host:port`` it was reached at.
        epoch: random number of this incarnation; another one means another process.
    """

    def __init__(
        self, engine: TransferEngine, channel: Channel, connection: int, address: str, hello: _wire.Hello
    ):
        self._engine = engine
        self._channel = channel
        self._connection = connection
        self._hello = hello
        self._core: CorePeer | None = None
        self._lock = threading.Lock()
        self.address = address
        self.epoch = hello.epoch

    @property
    def connection(self) -> int:
        """The number of the connection to it, by which compiled calls name it; never used again."""
        return self._connection

    @property
    def alive(self) -> bool:
        """Whether the connection to it stands."""
        return self._channel.alive(self._connection)

    def call(self, method: str, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        """Have the peer's handler of ``method`` answer, within ``timeout_s`` (default: ``call_timeout_s``).

        Raises RemoteError with what the handler raised; CallTimeout when the peer is there and has not
        answered by then, PeerUnreachable when it is gone: whether the handler ran is then unknown. Payload
        and answer hold at most 64 MiB.
        """
        called_method(method)
        payload_of(payload, "payload")
        limit_s = self._engine._limit_s(timeout_s, self._engine.config.call_timeout_s)
        return self._answer(self._channel.call, method, payload, limit_s)

    def _call_for(
        self, transfer: Transfer, ticket: int, method: str, payload: bytes, limit_s: float
    ) -> bytes:
        """As ``call``, but ends early when that held run of the transfer is cancelled."""
        return self._answer(functools.partial(transfer.call_peer, ticket), method, payload, limit_s)

    def _answer(
        self,
        ask: Callable[[int, str, bytes, float], tuple[bool, bytes]],
        method: str,
        payload: bytes,
        limit_s: float,
    ) -> bytes:
        try:
            failed, body = ask(self._connection, method, payload, limit_s)
        except (PeerUnreachable, CallTimeout) as error:
            kind = type(error)
            raise kind(f"calling {method!r} of {self.address} (at most {limit_s:g} s): {error}") from None
        if failed:
            failure = msgspec.msgpack.decode(body, type=_wire.Failure)
            raise RemoteError(failure.kind, failure.message, f"{method!r} of {self.address}")
        return body

    def notify(self, method: str, payload: bytes = b"", *, timeout_s: float | None = None) -> None:
        """Hand a message to the peer's handler of ``method``. Messages arrive in order.

        Waits only while the peer takes messages more slowly than they are sent: when 16 MiB are on their way
        to it, at most ``timeout_s`` (default: ``call_timeout_s``) for room. Raises CallTimeout when there is
        none by then, PeerUnreachable when the connection is known to have ended; otherwise nothing tells.
        """
        method_name(method, "method")
        payload_of(payload, "payload")
        limit_s = self._engine._limit_s(timeout_s, self._engine.config.call_timeout_s)
        try:
            self._channel.notify(self._connection, method, payload, limit_s)
        except (PeerUnreachable, CallTimeout) as error:
            kind = type(error)
            raise kind(f"notifying {method!r} of {self.address} (at most {limit_s:g} s): {error}") from None

    def fence(self, *, timeout_s: float | None = None) -> None:
        """Return once no byte of a write that failed or was cancelled can reach the peer's memory any more.

        The engine does so by itself before it writes there again; call it before others do. Writes under way
        over the same connections may fail over to others. Raises PeerUnreachable when the peer does not
        confirm it within ``timeout_s`` (default: ``fence_timeout_s``), PeerRestarted when it is gone.
        """
        limit_s = self._engine._limit_s(timeout_s, self._engine.config.fence_timeout_s)
        self._engine._fencer.fence(self.address, self.epoch, limit_s)

    def region(self, name: str, key: bytes) -> RemoteRegion:
        """Reach a region by its name and access key. Raises RegionRefused when they do not fit."""
        text(name, "name")
        payload_of(key, "key", "Region.key")
        try:
            descriptor = self.call(REGION_METHOD, msgspec.msgpack.encode(_wire.RegionQuery(name, key)))
        except RemoteError as error:
            if error.kind == RegionRefused.__name__:
                raise RegionRefused(f"{self.address} refused region {name!r}: {error.message}") from None
            raise
        return self._engine.import_region(descriptor)

    def close(self) -> None:
        """End the connection. Regions imported from the peer stay usable as long as it lives.

        The drivers' connections end with the last of those regions and their transfers. Safe to call twice.
        """
        if os.getpid() != self._engine._owner_pid:  # a forked child: the parent goes on with it
            return
        self._channel.disconnect(self._connection)
        self._engine._peers.forget(self)

    def _release_core(self) -> None:
        # Without the lock: who imports a region meanwhile may hold it for as long as drivers take to connect.
        self._core = None

    def _require_core(self) -> CorePeer:
        with self._lock:
            core = self._core
            if core is None:
                core = self._core = self._engine._core.add_peer(
                    self.address, self._connection, self.epoch, self._hello.drivers
                )
            return core
