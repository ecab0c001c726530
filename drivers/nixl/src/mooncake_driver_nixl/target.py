"""The side that owns memory: it listens, checks keys, and hands out what NIXL needs only to who has one."""

from __future__ import annotations

import hmac
import itertools
import secrets
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mooncake_driver_nixl.options import NixlOptions
from mooncake_driver_nixl.wire import (
    VERSION,
    Ask,
    Grant,
    Hello,
    Line,
    Message,
    PeerAddress,
    Released,
    Withdrawn,
)
from mooncake_transfer.listening import listen
from mooncake_transfer.python_driver import DriverFailure, EndpointMemory, StatusCode

__all__ = ["Region", "Target"]

ALL = 3  # mc_access: read and write


@dataclass(slots=True)
class Region:
    """Memory of this endpoint.

    Attributes:
        keys: access rights by key; 0 when revoked.
        leases: who may use it, by lease: the peer, and the key it came with.
    """

    memory: EndpointMemory
    registration: Any
    keys: dict[bytes, int]
    leases: dict[int, tuple[_Peer, bytes]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Peer:
    line: Line | None = None
    greeted: bool = False
    since: float = field(default_factory=time.monotonic)


class Target:
    """On the endpoint's thread only."""

    def __init__(
        self, options: NixlOptions, selector: selectors.BaseSelector, agent: Any, refused: Callable[[], None]
    ) -> None:
        self._options = options
        self._selector = selector
        self._agent = agent
        self._refused = refused
        self._secret = secrets.token_bytes(16)
        self._numbers = itertools.count(1)
        self._regions: dict[int, Region] = {}
        self._peers: list[_Peer] = []
        self._listener = listen(options.host, options.port)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> bytes:
        """What peers need to connect."""
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(PeerAddress(VERSION, self._options.host, port, self._secret))

    def add(self, memory: EndpointMemory, key: bytes) -> Region:
        """Register memory with NIXL, too. Raises DriverFailure."""
        if memory.kind != 0:
            raise DriverFailure(StatusCode.UNSUPPORTED, "the nixl driver moves main memory only")
        try:
            registration = self._agent.register_memory([(memory.address, memory.length, 0, "")], "DRAM")
        except Exception as error:  # NIXL has exceptions of its own for each of its statuses
            raise DriverFailure(StatusCode.NO_MEMORY, f"NIXL does not register it: {error!r}") from error
        region = Region(memory, registration, {key: ALL})
        self._regions[memory.region_id] = region
        return region

    def revoke(self, region: Region, key: bytes | None) -> bool:
        """Refuse from now on; whether nobody uses it (under the key) any more."""
        if key is not None and key not in region.keys:
            raise DriverFailure(StatusCode.INVALID, "the region never had this key")
        for known in list(region.keys) if key is None else [key]:
            if region.keys[known]:
                region.keys[known] = 0
                for lease, (peer, came_with) in region.leases.items():
                    if came_with == known and peer.line is not None:
                        peer.line.send(Withdrawn(lease))
        return not any(key is None or came_with == key for _, came_with in region.leases.values())

    def remove(self, region: Region) -> bool:
        """Revoke every key; take the memory back from NIXL once nobody uses it, and say whether it is so."""
        if not self.revoke(region, None):
            return False
        if self._regions.pop(region.memory.region_id, None) is not None:
            self._agent.deregister_memory(region.registration)
        return True

    def close(self) -> None:
        """End every connection."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for peer in self._peers:
            if peer.line is not None:
                peer.line.close()
        for region in self._regions.values():
            self._agent.deregister_memory(region.registration)
        self._regions.clear()

    def drop_silent(self) -> None:
        """Turn away who connected and did not greet in time."""
        late = time.monotonic() - self._options.answer_timeout_s
        for peer in [peer for peer in self._peers if not peer.greeted and peer.since < late]:
            if peer.line is not None:
                peer.line.close("it did not greet")

    def _accept(self, _events: int) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is left: the next look tries once more
            return
        peer = _Peer()
        self._peers.append(peer)
        peer.line = Line(
            self._selector,
            connected,
            lambda message: self._on_message(peer, message),
            lambda _reason: self._on_end(peer),
        )

    def _on_end(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        for region in self._regions.values():
            for lease in [lease for lease, (holder, _) in region.leases.items() if holder is peer]:
                del region.leases[lease]

    def _on_message(self, peer: _Peer, message: Message) -> None:
        assert peer.line is not None
        if not peer.greeted:
            good = isinstance(message, Hello) and message.version == VERSION
            if not good or not hmac.compare_digest(message.secret, self._secret):  # type: ignore[union-attr]
                return peer.line.close("it does not know the endpoint's address")
            peer.greeted = True
        elif isinstance(message, Ask):
            peer.line.send(self._answer(peer, message))
        elif isinstance(message, Released):
            for region in self._regions.values():
                if region.leases.get(message.lease, (None, b""))[0] is peer:
                    del region.leases[message.lease]
                    return None
        else:
            peer.line.close("it said what only targets say")
        return None

    def _answer(self, peer: _Peer, ask: Ask) -> Grant:
        region = self._regions.get(ask.region_id)
        name = f"region {ask.region_id}"
        if region is None:
            self._refused()
            return Grant(ask.remote, reason=f"{name} is not registered at the target")
        found = [key for key in region.keys if hmac.compare_digest(key, ask.key)]
        access = region.keys[found[0]] if found else 0
        if not access:
            self._refused()
            why = f"the access key for {name} was revoked" if found else f"wrong access key for {name}"
            return Grant(ask.remote, reason=why)
        lease = next(self._numbers)
        region.leases[lease] = (peer, found[0])
        metadata = self._agent.get_partial_agent_metadata(region.registration, True, ["UCX"])
        memory = region.memory
        return Grant(ask.remote, "", lease, access, memory.address, memory.length, self._agent.name, metadata)
