"""The transfer engine: registers memory, reaches peers, moves bytes."""

from __future__ import annotations

import hmac
import itertools
import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_transfer import _wire
from mooncake_transfer._address import is_address, join_address, split_address
from mooncake_transfer._core import Channel
from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._errors import (
    ConfigError,
    DriverUnavailable,
    EngineClosed,
    PeerIncompatible,
    PeerRestarted,
    PeerUnreachable,
    RegionRefused,
)
from mooncake_transfer._serving import Dispatcher, Handler, LostHandler
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.drivers import DriverStatus, select_drivers
from mooncake_transfer.hooks import DriverInfo
from mooncake_transfer.memory import Memory, allocate_shareable, wrap
from mooncake_transfer.peer import REGION_METHOD, Caller, Peer
from mooncake_transfer.region import Region, RemoteRegion
from mooncake_transfer.registry.directory import Directory
from mooncake_transfer.tls import driver_options, secure
from mooncake_transfer.transfer import Transfer

__all__ = ["TransferEngine"]

WILDCARD_HOSTS = {"", "0.0.0.0", "::"}

log = logging.getLogger(__name__)


class TransferEngine:
    """Moves batches of bytes between registered memory of this process and of peers. Thread-safe.

    Use it as a context manager, or call ``close()``. A forked child must not use it.

    Attributes:
        config: what it was made with.
        address: ``host:port`` under which peers reach it.
        epoch: random number of this incarnation.
        drivers: what the probe of every installed (or asked-for) driver said.
    """

    def __init__(self, config: TransferConfig | None = None) -> None:
        """Open drivers and listen. Raises ConfigError (for example: port taken) or DriverUnavailable."""
        self.config = config or TransferConfig()
        self.epoch = secrets.randbits(63) | 1
        self.drivers: dict[str, DriverStatus] = {}
        self._core = CoreEngine()
        self._channel = Channel(silence_s=self.config.peer_timeout_s)
        self._regions: dict[int, Region] = {}
        self._region_ids = itertools.count(1)
        self._peers: dict[str, Peer] = {}
        self._peer_locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._dispatcher = Dispatcher(self._channel, self.config.handler_threads)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._channel, self._dispatcher, self._core, os.getpid()
        )
        try:
            self.address = self._start()
            self._directory = Directory(self.config, self.address, self.epoch)
            # Made after the engine's own, so it runs before: a name is taken back while it still leads here.
            self._leave_directory = weakref.finalize(self, _leave, self._directory, os.getpid())
        except BaseException:
            self.close()
            raise

    def _start(self) -> str:
        config = self.config
        host = config.advertise_host or config.host
        if host in WILDCARD_HOSTS:
            raise ConfigError(
                f"peers cannot reach {host!r}; set advertise_host to a name or address of this machine"
            )
        if config.tls is not None:
            secure(self._channel, config.tls)
        first, last = config.port_range or (config.port, config.port)
        self._channel.listen(config.host, first, last)
        address = join_address(host, self._channel.port)
        self._open_drivers()
        self._core.start()
        self.serve(REGION_METHOD, _RegionsByName(weakref.ref(self)))
        hello = _wire.Hello(_wire.PROTOCOL, self.epoch, address, self._core.addresses())
        self._channel.start(msgspec.msgpack.encode(hello))
        self._dispatcher.start()
        return address

    def _open_drivers(self) -> None:
        unknown = set(self.config.driver_options) - {info.name for info, _ in select_drivers(None)}
        if unknown:
            raise ConfigError(f"driver_options names drivers that are not installed: {sorted(unknown)}")
        opened = 0
        for info, status in select_drivers(self.config.drivers):
            if status.usable:
                status = self._open_driver(info, status)
            self.drivers[info.name] = status
            opened += status.usable
        if not opened:
            reasons = "; ".join(f"{s.name}: {s.reason}" for s in self.drivers.values())
            raise DriverUnavailable(f"no driver can be used here ({reasons or 'none is installed'})")

    def _open_driver(self, info: DriverInfo, status: DriverStatus) -> DriverStatus:
        options = dict(self.config.driver_options.get(info.name, {}))
        if info.network:
            options = {"host": self.config.host, **driver_options(self.config.tls), **options}
        rendered = list(info.options(options).items())
        try:
            self._core.add_driver(info.load(), info.name, rendered)
        except Exception as error:  # a third party's code; without it the other drivers still work
            if self.config.drivers is not None:
                raise DriverUnavailable(f"driver {info.name!r} does not start: {error}") from error
            log.warning("driver %s does not start: %s", info.name, error)
            return DriverStatus(info.name, info.priority, False, reason=f"it does not start: {error}")
        return status

    # ---- regions

    def allocate(self, nbytes: int, *, name: str = "", prefault: bool = False) -> Region:
        """Allocate and register zeroed memory that same-host peers can map.

        With ``prefault`` every page is backed now, which makes the first transfers as fast as later ones.
        Raises MemoryUnavailable, ConfigError.
        """
        return self._register(lambda: allocate_shareable(nbytes, name, prefault=prefault), name)

    def register(self, memory: object, *, name: str = "") -> Region:
        """Register memory in place: numpy array, CPU tensor, bytearray, or any writable contiguous buffer.

        The region keeps it alive until closed. Raises ConfigError when it is no such memory.
        """
        return self._register(lambda: wrap(memory), name)

    def _register(self, source: Callable[[], Memory], name: str) -> Region:
        self._require_open()
        region_id = next(self._region_ids)
        name = name or f"region-{region_id}"
        memory, key = source(), secrets.token_bytes(16)
        try:
            core = self._core.register_region(memory.address, memory.nbytes, memory.fd, region_id, key, name)
        except BaseException:
            memory.close()
            raise
        region = Region(self, core, memory, name, region_id, key)
        with self._lock:
            self._regions[region_id] = region
        return region

    def import_region(self, descriptor: bytes, *, timeout_s: float | None = None) -> RemoteRegion:
        """Reach the region that ``Region.descriptor()`` of a peer described; connects to the peer if need be.

        Raises ConfigError for bytes that are no descriptor, PeerUnreachable, PeerRestarted when the process
        that made it is gone, PeerIncompatible, NoRoute when no driver leads there. A wrong key is found by
        the first transfer.
        """
        try:
            found = msgspec.msgpack.decode(descriptor, type=_wire.Descriptor)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{len(descriptor)} bytes are no region descriptor: {error}") from None
        _check_protocol(found.protocol, f"the descriptor of region {found.name!r} of {found.address}")
        peer = self.connect(found.address, timeout_s=timeout_s)
        if peer.epoch != found.epoch:
            raise PeerRestarted(
                f"region {found.name!r} is gone: another process now answers at {found.address}"
            )
        core = self._core.import_region(
            peer._require_core(), found.name, found.region_id, found.key, found.length, found.keys
        )
        return RemoteRegion(core, found.name, found.length, peer)

    def _describe(self, region: Region) -> bytes:
        keys = self._core.export_keys(region._require_core())
        return msgspec.msgpack.encode(
            _wire.Descriptor(
                _wire.PROTOCOL,
                self.address,
                self.epoch,
                region.name,
                region._id,
                region.key,
                region.nbytes,
                keys,
            )
        )

    def _close_region(self, region: Region, timeout_s: float | None) -> None:
        core = region._core
        if core is None:
            return
        self._directory.withdraw(region)
        self._core.close_region(core, self.config.close_timeout_s if timeout_s is None else timeout_s)
        with self._lock:
            if self._regions.pop(region._id, None) is None:
                return
        region._core = None
        region._memory.close()

    # ---- peers

    def connect(self, address: str, *, timeout_s: float | None = None) -> Peer:
        """Reach the engine at ``host:port``, or the one the registry knows by a name without a port.

        A standing connection is used again. Raises PeerUnreachable when no engine answers within
        ``timeout_s`` (default: ``connect_timeout_s``), ConfigError for a malformed address; with a name also
        NameUnknown, RegistryUnavailable.
        """
        self._require_open()
        if not is_address(address):
            limit_s = self.config.connect_timeout_s if timeout_s is None else timeout_s
            return self._directory.connect(address, lambda at, s: self.connect(at, timeout_s=s), limit_s)
        host, port = split_address(address)
        with self._lock:
            address_lock = self._peer_locks.setdefault(address, threading.Lock())
        limit_s = self.config.connect_timeout_s if timeout_s is None else timeout_s
        started_s = time.monotonic()
        if not address_lock.acquire(timeout=min(max(limit_s, 0.0), threading.TIMEOUT_MAX)):
            raise PeerUnreachable(f"{address} did not answer another thread of this process in {limit_s:g} s")
        try:
            peer = self._peers.get(address)
            if peer is None or not peer.alive:
                left_s = limit_s - (time.monotonic() - started_s)
                peer = self._peers[address] = self._connect(host, port, address, left_s)
            return peer
        finally:
            address_lock.release()

    def _connect(self, host: str, port: int, address: str, limit_s: float) -> Peer:
        connection, body = self._channel.connect(host, port, limit_s)
        try:
            hello = msgspec.msgpack.decode(body, type=_wire.Hello)
        except msgspec.MsgspecError as error:
            self._channel.disconnect(connection)
            raise PeerUnreachable(
                f"{address} answers with something that is no engine's hello: {error}"
            ) from None
        try:
            _check_protocol(hello.protocol, f"the engine at {address}")
        except PeerIncompatible:
            self._channel.disconnect(connection)
            raise
        return Peer(self, self._channel, connection, address, hello)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer ``Peer.call`` and take ``Peer.notify`` of ``method`` with ``handler(payload, caller)``.

        Calls run on ``handler_threads`` threads, notifications one after another in order. What a handler
        raises reaches the caller as RemoteError. Raises ConfigError when the method has a handler.
        """
        self._dispatcher.serve(method, handler)

    def on_peer_lost(self, handler: LostHandler) -> None:
        """Call ``handler(caller)`` once for each peer whose connection here ends: it died or closed.

        It runs after all of that connection's calls were answered, so it sees their effects.
        """
        self._dispatcher.on_peer_lost(handler)

    def publish(self, region: Region, *, name: str = "") -> None:
        """Let peers find ``region`` as ``engine-name/name`` (default: the region's own name).

        Who can read the registry then may read and write the region. It is taken back when the region or the
        engine is closed, and expires when the process dies. A registry that does not answer gets it later.
        Raises ConfigError when the engine has no name, RegionClosed.
        """
        self._require_open()
        self._directory.publish(region, name or region.name, region.descriptor())

    def find_region(self, path: str, *, timeout_s: float | None = None) -> RemoteRegion:
        """Reach the region that a peer published: ``engine-name/region-name``.

        Raises NameUnknown, RegistryUnavailable, and as ``import_region`` does.
        """
        self._require_open()
        limit_s = self.config.connect_timeout_s if timeout_s is None else timeout_s
        return self._directory.find_region(path, lambda d, s: self.import_region(d, timeout_s=s), limit_s)

    # ---- transfers

    def read(self, local: Region, remote: RemoteRegion, blocks: npt.ArrayLike) -> Transfer:
        """Start copying from ``remote`` into ``local``.

        ``blocks``: N x 3 array of uint64, rows of local offset, remote offset and length in bytes. Contiguous
        rows are moved as one; empty ones are skipped. Never blocks on the peer. Raises RegionRefused for a
        range outside a region, RegionClosed, NoRoute, ConfigError.
        """
        return self._submit(False, local, remote, blocks)

    def write(self, local: Region, remote: RemoteRegion, blocks: npt.ArrayLike) -> Transfer:
        """Start copying from ``local`` into ``remote``; otherwise as ``read``."""
        return self._submit(True, local, remote, blocks)

    def _submit(self, write: bool, local: Region, remote: RemoteRegion, blocks: npt.ArrayLike) -> Transfer:
        if local._engine is not self:
            raise ConfigError(f"region {local.name!r} is registered with another engine")
        core = self._core.submit(write, local._require_core(), remote._require_core(), _as_blocks(blocks))
        what = f"{'write to' if write else 'read from'} region {remote.name!r} of {remote.peer.address}"
        return Transfer(self._core, core, what, self.config.transfer_timeout_s)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters of each driver: connections, ops, bytes_read, bytes_written, errors, refused."""
        return self._core.stats()

    # ---- life

    def close(self) -> None:
        """End every transfer (EngineClosed), revoke every region, leave no thread. Safe to call twice."""
        if hasattr(self, "_leave_directory"):
            self._leave_directory()
        self._finalizer()
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            region._core = None
            region._memory.close()
        self._peers.clear()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise EngineClosed("the engine has been closed; make a new one")

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _RegionsByName:
    """Handler of REGION_METHOD: a region's descriptor for who knows its name and key."""

    def __init__(self, engine: weakref.ref[TransferEngine]):
        self._engine = engine

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        query = msgspec.msgpack.decode(body, type=_wire.RegionQuery)
        engine = self._engine()
        if engine is None:
            raise EngineClosed("the engine is closing")
        with engine._lock:
            named = [region for region in engine._regions.values() if region.name == query.name]
        for region in named:
            if hmac.compare_digest(region.key, query.key):
                return region.descriptor()
        # One answer for both mistakes: who has no key does not learn which names exist.
        raise RegionRefused(f"no region named {query.name!r} has this access key")


def _as_blocks(blocks: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    array = np.asarray(blocks)
    if array.size == 0:
        return np.empty((0, 3), dtype=np.uint64)
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"blocks must be an N x 3 integer array (local offset, remote offset, length), "
            f"got shape {array.shape} of {array.dtype}"
        )
    if array.dtype.kind == "i" and array.min() < 0:
        raise ConfigError("blocks holds a negative offset or length")
    return np.ascontiguousarray(array, dtype=np.uint64)


def _check_protocol(theirs: int, whose: str) -> None:
    if theirs != _wire.PROTOCOL:
        raise PeerIncompatible(
            f"{whose} speaks protocol {theirs}, this engine {_wire.PROTOCOL}; "
            "install versions of mooncake-transfer that fit together"
        )


def _leave(directory: Directory, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        directory.close()


def _shut_down(channel: Channel, dispatcher: Dispatcher, core: CoreEngine, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: threads, sockets and regions are its parent's
    channel.close()
    dispatcher.stop()
    core.close()
