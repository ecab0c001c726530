"""Keys are asked of the owners of the memory: the master does not keep them."""

from __future__ import annotations

import hmac
import weakref
from collections.abc import Callable, Iterator

import msgspec

from mooncake_store import protocol
from mooncake_store._core import tenant_keys
from mooncake_store._errors import NotAuthorised, OwnerUnreachable
from mooncake_store.membership import Membership
from mooncake_store.notices import Notices
from mooncake_store.protocol import METHOD
from mooncake_store.tickets import ticket
from mooncake_transfer import Caller, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, RemoteError

__all__ = ["Listing"]

Answer = Callable[[bytes, Caller], bytes]


class KeysWanted(msgspec.Struct, array_like=True):
    """One part of an owner's keys of a tenant, those that begin so."""

    tenant: str
    ticket: bytes
    begin: bytes
    part: int


class KeysThere(msgspec.Struct, array_like=True):
    """Keys with the bytes of their values; ``more``: there is a further part."""

    keys: list[tuple[bytes, int]]
    more: bool


def _method(client: int) -> str:
    return f"{METHOD}.keys.{client:016x}"


class Listing:
    """Answers for this client's segment, and asks all owners. Thread-safe."""

    def __init__(
        self, engine: TransferEngine, member: Membership, notices: Notices, tenant: str, timeout_s: float
    ) -> None:
        self._engine = engine
        self._member = member
        self._notices = notices
        self._tenant = tenant
        self._timeout_s = timeout_s
        # The engine keeps the handler for good; it must not keep the store with it.
        answer: weakref.WeakMethod[Answer] = weakref.WeakMethod(self._answer)
        engine.serve(_method(member.client), lambda payload, caller: _call(answer, payload, caller))

    def keys(self, begin: bytes) -> Iterator[tuple[bytes, int]]:
        """Keys of this tenant that begin so, of all owners; some twice. Raises OwnerUnreachable."""
        # What this client has not been told yet, its own ledger lacks.
        for owner in self._member.ask(protocol.FindOwners(), protocol.Owners).owners:
            client, address, shown = owner
            part, more = 0, True
            while more:
                wanted = KeysWanted(self._tenant, shown, begin, part)
                there = self._ask(client, address, wanted)
                yield from there.keys
                part, more = part + 1, there.more

    def _ask(self, client: int, address: str, wanted: KeysWanted) -> KeysThere:
        if client == self._member.client:
            return self._part(wanted)
        try:
            peer = self._engine.connect(address, timeout_s=self._timeout_s)
            payload = peer.call(_method(client), msgspec.msgpack.encode(wanted), timeout_s=self._timeout_s)
        except (PeerUnreachable, RemoteError) as error:
            raise OwnerUnreachable(
                f"the owner at {address} does not tell the keys of its values: {error}; a retry is safe"
            ) from error
        return msgspec.msgpack.decode(payload, type=KeysThere)

    def _answer(self, payload: bytes, caller: Caller) -> bytes:
        wanted = msgspec.msgpack.decode(payload, type=KeysWanted)
        if not hmac.compare_digest(ticket(self._member.secret, wanted.tenant), wanted.ticket):
            raise NotAuthorised(f"the keys of tenant {wanted.tenant!r} are shown to those its master names")
        return msgspec.msgpack.encode(self._part(wanted))

    def _part(self, wanted: KeysWanted) -> KeysThere:
        # Lazily sent records of what was stored lately are fetched first.
        if wanted.part == 0:
            self._member.catch_up()
        frames = self._notices.part(wanted.part)
        if frames is None:
            return KeysThere([], more=False)
        return KeysThere(tenant_keys(frames, wanted.tenant, wanted.begin), more=True)


def _call(
    answer: weakref.WeakMethod[Callable[[bytes, Caller], bytes]], payload: bytes, caller: Caller
) -> bytes:
    method = answer()
    if method is None:
        raise OwnerUnreachable("the store of this owner has been closed")
    return method(payload, caller)
