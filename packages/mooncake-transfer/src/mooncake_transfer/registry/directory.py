"""Names of engines and of their published regions, as one engine sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from mooncake_transfer._errors import (
    ConfigError,
    NameUnknown,
    PeerRestarted,
    PeerUnreachable,
    RegistryUnavailable,
)
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.registry.announcer import Announcer
from mooncake_transfer.registry.deadline import TimedRegistry
from mooncake_transfer.registry.finding import open_registry
from mooncake_transfer.registry.records import EngineRecord, RegionRecord, engine_key, region_key

if TYPE_CHECKING:
    from mooncake_transfer.peer import Peer
    from mooncake_transfer.region import Region, RemoteRegion

__all__ = ["Directory"]

# How soon an entry that leads to a process of the past is read again.
STALE_RETRY_S = 0.1
# Between the last deadline of a question and the end of the thread that asked it.
END_SLACK_S = 1.0

Record = TypeVar("Record", EngineRecord, RegionRecord)
Found = TypeVar("Found")


class Directory:
    """What an engine asks its registry: its own name and regions are announced, those of others looked up.

    Without a registry in the configuration, every name is a ConfigError. Thread-safe. Holds no reference to
    the engine.
    """

    def __init__(self, config: TransferConfig, address: str, epoch: int) -> None:
        """Open the registry and announce the name; a registry that does not answer is tried again later.

        Raises ConfigError for a URL that cannot work and for one whose extra is not installed.
        """
        self._config = config
        self._registry: TimedRegistry | None = None
        # Its own: an etcd lease belongs to one client.
        self._announcing: TimedRegistry | None = None
        self._announcer: Announcer | None = None
        self._known: dict[str, bytes] = {}
        self._peers: dict[str, tuple[Peer, float]] = {}
        self._published: dict[str, Region] = {}
        self._closing = threading.Event()
        if config.registry:
            self._registry = open_registry(config.registry, config.registry_timeout_s)
            if config.name:
                self._announcing = open_registry(config.registry, config.registry_timeout_s)
                self._announcer = Announcer(
                    self._announcing, config.name, address, epoch, config.registry_ttl_s
                )
                self._announcer.start(config.registry_timeout_s)

    # ---- others

    def connect(self, name: str, reach: Callable[[str, float], Peer], timeout_s: float) -> Peer:
        """Reach the engine that has ``name``, by ``reach(address, timeout_s)``.

        A standing connection is used again. Whether the name still leads to that engine is asked once in a
        lifetime of entries. Raises NameUnknown, RegistryUnavailable, PeerUnreachable.
        """
        known = self._peers.get(name)
        if known is not None and known[0].alive and time.monotonic() < known[1]:
            return known[0]

        def reach_epoch(record: EngineRecord, left_s: float) -> Peer:
            peer = reach(record.address, left_s)
            if peer.epoch != record.epoch:
                raise PeerRestarted(
                    f"{name!r} is registered at {record.address}, where another process answers now; "
                    f"it is found again when it has announced itself"
                )
            return peer

        try:
            peer = self._follow(engine_key(name), f"engine {name!r}", EngineRecord, reach_epoch, timeout_s)
        except RegistryUnavailable:
            if known is None or not known[0].alive:
                raise
            peer = known[0]
        self._peers[name] = (peer, time.monotonic() + self._config.registry_ttl_s)
        if not peer.alive:  # it ended meanwhile, and whoever forgets such peers may have been here before
            self.forget(peer)
        return peer

    def forget(self, peer: Peer) -> None:
        """Keep a peer no longer that was closed or is gone; its names are looked up again."""
        for name, (known, _) in list(self._peers.items()):
            if known is peer:
                self._peers.pop(name, None)

    def find_region(
        self, path: str, take: Callable[[bytes, float], RemoteRegion], timeout_s: float
    ) -> RemoteRegion:
        """Reach a published region, by ``take(descriptor, timeout_s)``. Raises as ``connect`` does."""
        engine, slash, region = path.partition("/")
        if not (engine and slash and region):
            raise ConfigError(f"{path!r} names no region; write engine-name/region-name")
        return self._follow(
            region_key(engine, region),
            f"region {path!r}",
            RegionRecord,
            lambda record, left_s: take(record.descriptor, left_s),
            timeout_s,
        )

    def _follow(
        self,
        key: str,
        what: str,
        kind: type[Record],
        go: Callable[[Record, float], Found],
        timeout_s: float,
    ) -> Found:
        """Go where an entry leads; one that is out of date is read again until the deadline.

        When the registry does not answer or has lost the name, what it said last is tried: the engine may
        well be there, and its epoch tells if it is another one. A region that is no longer listed was taken
        back.
        """
        deadline_s = time.monotonic() + timeout_s
        outdated: Exception | None = None
        while True:
            trouble: Exception | None = None
            try:
                value = self._look_up(key, what, deadline_s - time.monotonic())
            except (NameUnknown, RegistryUnavailable) as error:
                if outdated is not None and time.monotonic() >= deadline_s:
                    raise outdated from error
                if kind is RegionRecord and isinstance(error, NameUnknown):
                    self._known.pop(key, None)
                known = self._known.get(key)
                if known is None:
                    raise
                value, trouble = known, error
            left_s = max(deadline_s - time.monotonic(), 0.0)
            try:
                found = go(_decode(value, kind, what), left_s)
            except (PeerUnreachable, PeerRestarted) as error:
                if isinstance(trouble, NameUnknown):  # neither registered nor there
                    self._known.pop(key, None)
                if trouble is not None:
                    raise trouble from error
                left_s = deadline_s - time.monotonic()
                if left_s <= STALE_RETRY_S or self._closing.wait(STALE_RETRY_S):
                    raise
                outdated = error
            else:
                self._known[key] = value
                return found

    def _look_up(self, key: str, what: str, timeout_s: float) -> bytes:
        registry = self._require_registry(what)
        value = registry.get(key, timeout_s)
        if value is None:
            raise NameUnknown(
                f"registry {registry.where} has no {what}: it was never announced, or its engine is gone; "
                "`mooncake metadata list` shows what there is"
            )
        return value

    def _require_registry(self, what: str) -> TimedRegistry:
        if self._registry is None:
            instead = "import_region(descriptor)" if what.startswith("region") else "host:port"
            raise ConfigError(
                f"{what} cannot be looked up without a registry; use {instead} or set TransferConfig.registry"
            )
        return self._registry

    # ---- this engine

    def publish(self, region: Region, name: str, descriptor: bytes) -> None:
        """Announce a region. Raises ConfigError when the engine has no name, or another region that one."""
        if self._announcer is None:
            raise ConfigError(
                f"region {name!r} cannot be published by an engine without a name: "
                "set TransferConfig.registry and TransferConfig.name"
            )
        if self._published.setdefault(name, region) is not region:
            raise ConfigError(
                f"another region of this engine is published as {name!r}; "
                "withdraw that first (engine.withdraw), or publish under another name"
            )
        self._announcer.publish(name, descriptor, self._config.registry_timeout_s)

    def withdraw(self, region: Region | str) -> None:
        """Take back every name a region was published under, or one name."""
        for name, other in list(self._published.items()):
            if other is not region and name != region:
                continue
            self._published.pop(name, None)
            if self._announcer is not None:
                self._announcer.withdraw(name)

    def close(self) -> None:
        """Leave the registry, in a little more than ``registry_timeout_s`` at most. Safe to call twice."""
        self._closing.set()
        if self._announcer is not None:
            if self._announcing is not None:
                self._announcing.end_within(self._config.registry_timeout_s)
            self._announcer.stop(self._config.registry_timeout_s + END_SLACK_S)
        for registry in (self._announcing, self._registry):
            if registry is not None:
                registry.close()
        self._peers.clear()
        self._published.clear()


def _decode(value: bytes, kind: type[Record], what: str) -> Record:
    try:
        return msgspec.json.decode(value, type=kind)
    except msgspec.MsgspecError as error:
        raise NameUnknown(f"the entry of {what} was not written by an engine: {error}") from None
