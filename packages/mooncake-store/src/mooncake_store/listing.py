"""Keys are asked of the owners of the memory: the master does not keep them."""

from __future__ import annotations

import hmac
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import msgspec

from mooncake_store import protocol
from mooncake_store._core import tenant_keys
from mooncake_store._errors import NotAuthorised, OwnerUnreachable, StoreError
from mooncake_store.keys import object_digests
from mooncake_store.membership import Membership
from mooncake_store.notices import Notices
from mooncake_store.protocol import METHOD, HotObject
from mooncake_store.tickets import ticket
from mooncake_transfer import Caller, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, RemoteError, TransferError

__all__ = ["Listing"]

Answer = Callable[[bytes, Caller], bytes]
NAMES_WAIT_S = 1.0  # for an owner that is asked what something is called
NAMES_IN_ALL_S = 2.0
NAMES_AGAIN_S = 10.0  # after which what nobody named is asked for again
MOST_NAMES = 4096

log = logging.getLogger(__name__)


class KeysWanted(msgspec.Struct, array_like=True):
    """One part of an owner's keys of a tenant, those that begin so."""

    tenant: str
    ticket: bytes
    begin: bytes
    part: int


class NamesWanted(msgspec.Struct, array_like=True):
    """Keys of versions that lie in an owner's segment, as far as they are the tenant's."""

    tenant: str
    ticket: bytes
    versions: list[int]


class KeysThere(msgspec.Struct, array_like=True):
    """Keys with the bytes of their values; ``more``: there is a further part."""

    keys: list[tuple[bytes, int]]
    more: bool


def _method(client: int) -> str:
    return f"{METHOD}.keys.{client:016x}"


def _names_method(client: int) -> str:
    return f"{METHOD}.names.{client:016x}"


class KnownNames:
    """Keys by digest, which never change; and digests that no owner named, for a while. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}
        self._asked_s: dict[str, float] = {}

    def fill(self, hot: list[HotObject]) -> list[HotObject]:
        """Put in the keys that are known; those that are worth asking for."""
        now_s = time.monotonic()
        with self._lock:
            for one in hot:
                one.key = self._known.get(one.digest, b"")
            return [
                one
                for one in hot
                if not one.key and one.version and now_s >= self._asked_s.get(one.digest, 0.0) + NAMES_AGAIN_S
            ]

    def keep(self, asked: list[HotObject]) -> None:
        """Those that were asked for, with what they were named."""
        with self._lock:
            for known in (self._known, self._asked_s):
                if len(known) > MOST_NAMES:
                    known.clear()
            for one in asked:
                if one.key:
                    self._known[one.digest] = one.key
                self._asked_s[one.digest] = time.monotonic()


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
        names: weakref.WeakMethod[Answer] = weakref.WeakMethod(self._answer_names)
        engine.serve(_names_method(member.client), lambda payload, caller: _call(names, payload, caller))
        self._names = KnownNames()

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

    def named(self, hot: list[HotObject]) -> None:
        """Fill in the keys of this tenant's. Who does not answer at once is asked later: a name is no matter
        to wait for, and the same for ever.
        """
        unknown = self._names.fill(hot)
        if not unknown:
            return
        try:
            owners = self._member.ask(protocol.FindOwners(), protocol.Owners).owners
        except StoreError as error:
            log.debug("nobody says who could name what is hot: %s", error)
            return
        until_s = time.monotonic() + NAMES_IN_ALL_S
        for client, address, shown in owners:
            if time.monotonic() > until_s:
                break
            wanted = NamesWanted(self._tenant, shown, [one.version for one in unknown])
            try:
                keys = self._ask_names(client, address, wanted)
            except (StoreError, TransferError, msgspec.DecodeError) as error:
                log.debug("the owner at %s does not name what is hot there: %s", address, error)
                continue
            for one, key in zip(unknown, keys, strict=False):
                if key and object_digests(self._tenant, [key]).hex() == one.digest:
                    one.key = key
        self._names.keep(unknown)

    def _ask_names(self, client: int, address: str, wanted: NamesWanted) -> list[bytes]:
        if client == self._member.client:
            return self._names_here(wanted)
        peer = self._engine.connect(address, timeout_s=NAMES_WAIT_S)
        payload = peer.call(_names_method(client), msgspec.msgpack.encode(wanted), timeout_s=NAMES_WAIT_S)
        return msgspec.msgpack.decode(payload, type=list[bytes])

    def _answer_names(self, payload: bytes, caller: Caller) -> bytes:
        wanted = msgspec.msgpack.decode(payload, type=NamesWanted)
        self._admit(wanted.tenant, wanted.ticket)
        return msgspec.msgpack.encode(self._names_here(wanted))

    def _names_here(self, wanted: NamesWanted) -> list[bytes]:
        self._member.catch_up()  # what was stored lately may not have been told here yet
        return [self._notices.tenant_key(version, wanted.tenant) for version in wanted.versions]

    def _admit(self, tenant: str, shown: bytes) -> None:
        if not hmac.compare_digest(ticket(self._member.secret, tenant), shown):
            raise NotAuthorised(f"the keys of tenant {tenant!r} are shown to those its master names")

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
        self._admit(wanted.tenant, wanted.ticket)
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
