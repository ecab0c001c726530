"""The transfer engine: registers memory, reaches peers, moves bytes."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._address import is_address, join_address, split_address
from mooncake_transfer._arguments import flag, instance, number, one_of, region_name, seconds, text, wrong
from mooncake_transfer._core import Channel, compiled_calls
from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._descriptors import check_protocol, decode_descriptor
from mooncake_transfer._errors import (
    ConfigError,
    EngineClosed,
    EngineForked,
    PeerIncompatible,
    PeerRestarted,
    PeerUnreachable,
    TransferError,
)
from mooncake_transfer._fencing import Fencer, Fences
from mooncake_transfer._integrity import Checksums, Integrity
from mooncake_transfer._link_local import with_interface, without_interface
from mooncake_transfer._mapping import MAP_METHOD, Mappings
from mooncake_transfer._metrics_export import MetricsExport
from mooncake_transfer._notices import NoticeReader
from mooncake_transfer._opening import allocate, open_drivers
from mooncake_transfer._peers import Peers
from mooncake_transfer._regions_by_name import RegionsByName
from mooncake_transfer._serving import Dispatcher, Handler, LostHandler
from mooncake_transfer._watching import Watcher
from mooncake_transfer.beacon import Beacon
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.drivers import DriverStatus
from mooncake_transfer.grid import Blocks
from mooncake_transfer.introspection import STATS_METHOD, SnapshotServer
from mooncake_transfer.listening import is_wildcard
from mooncake_transfer.memory import (
    DeviceSource,
    FileSource,
    Memory,
    RegionMap,
    device_source,
    file_source,
    wrap,
)
from mooncake_transfer.peer import CHECKSUM_METHOD, FENCE_METHOD, REGION_METHOD, Peer
from mooncake_transfer.rails import RailStatus
from mooncake_transfer.region import Access, Region, RemoteRegion
from mooncake_transfer.registry.directory import Directory
from mooncake_transfer.tls import secure
from mooncake_transfer.transfer import PostOptions, Transfer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["TransferEngine"]

ACCESS_BITS = {"r": 1, "w": 2, "rw": 3}  # mc_access


class TransferEngine:
    """Moves batches of bytes between registered memory of this process and of peers. Thread-safe.

    Use it as a context manager, or call ``close()``. In a forked child everything that moves bytes or asks
    peers raises EngineForked; closing there does nothing.

    Attributes:
        config: what it was made with.
        address: ``host:port`` under which peers reach it.
        epoch: random number of this incarnation.
        drivers: what the probe of every installed (or asked-for) driver said.
    """

    def __init__(self, config: TransferConfig | None = None) -> None:
        """Open drivers and listen. Raises ConfigError (for example: port taken), DriverUnavailable, and
        TransferError when the system has no threads or descriptors left.
        """
        if config is not None:
            instance(config, TransferConfig, "config", "or None for one with the defaults")
        self.config = config or TransferConfig()
        self.epoch = secrets.randbits(63) | 1
        self.drivers: dict[str, DriverStatus] = {}
        self._channel = Channel(silence_s=self.config.peer_timeout_s)
        self._core = CoreEngine(self._channel)
        self._regions: dict[int, Region] = {}
        self._ranges = RegionMap()
        self._region_ids = itertools.count(1)
        self._peers = Peers()
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._dispatcher = Dispatcher(self._channel, self.config.handler_threads)
        self._watcher = Watcher()
        sample = self.config.integrity_sample if self.config.integrity == "sample" else None
        self._verifier = Integrity(self, sample)
        self._integrity = None if self.config.integrity == "off" else self._verifier
        self._fencer = Fencer(self, self._core, self.config.fence_timeout_s)
        self._notices = NoticeReader(self._core, self._verifier.moved, self._fencer.ask)
        self._metrics, self._beacon = MetricsExport(), Beacon()
        self._finalizer = weakref.finalize(
            self,
            _shut_down,
            self._channel,
            self._core,
            (
                self._metrics,
                self._beacon,
                self._dispatcher,
                self._notices,
                self._fencer,
                self._verifier,
                self._watcher,
            ),
            self._owner_pid,
        )
        try:
            self.address = self._start()
            self._beacon.start(self.address)
            if self.config.metrics_port is not None:
                self._metrics.start(self, self.config.host, self.config.metrics_port)
            self._directory = Directory(self.config, self.address, self.epoch)
            self._peers.on_forget = self._directory.forget
            # Made after the engine's own, so it runs before: a name is taken back while it still leads here.
            self._leave_directory = weakref.finalize(self, _leave, self._directory, self._owner_pid)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, TransferError):
                raise TransferError(
                    f"the engine does not start: {error}; with too many files open, raise `ulimit -n`"
                ) from error
            raise

    def _start(self) -> str:
        config = self.config
        host = config.advertise_host or config.host
        if is_wildcard(host):
            raise ConfigError(
                f"peers cannot reach {host!r}; set advertise_host to a name or address of this machine"
            )
        if config.tls is not None:
            secure(self._channel, config.tls)
        first, last = config.port_range or (config.port, config.port)
        self._channel.listen(config.host, first, last)
        address = join_address(without_interface(host), self._channel.port)
        self._core.set_policy(**msgspec.structs.asdict(config.rails))
        self.drivers = open_drivers(self._core, config)
        self._core.start()
        self._dispatcher.serve_own(REGION_METHOD, RegionsByName(weakref.ref(self)))
        self._dispatcher.serve_own(CHECKSUM_METHOD, Checksums(weakref.ref(self)))
        self._dispatcher.serve_own(MAP_METHOD, Mappings(weakref.ref(self)))
        self._dispatcher.serve_own(FENCE_METHOD, Fences(self._core))
        self._dispatcher.serve_own(STATS_METHOD, SnapshotServer(self))
        hello = _wire.Hello(_wire.PROTOCOL, self.epoch, address, self._core.addresses())
        self._channel.start(msgspec.msgpack.encode(hello))
        self._dispatcher.start()
        self._notices.start()
        return address

    @property
    def metrics_address(self) -> str | None:
        """Where ``/metrics`` is served for Prometheus; None without ``metrics_port``."""
        return self._metrics.address

    # ---- regions

    def allocate(
        self,
        nbytes: int,
        *,
        name: str = "",
        prefault: bool = False,
        huge_pages: bool | str = False,
        numa_node: int | None = None,
        driver: str | None = None,
    ) -> Region:
        """Allocate and register zeroed memory that same-host peers can map.

        Args:
            nbytes: its size.
            name: what messages call it; up to 255 bytes of UTF-8.
            prefault: back every page now, which makes the first transfers as fast as later ones.
            huge_pages: take the machine's huge pages: True for the default size, or ``"2M"``, ``"1G"``; or
                ``"transparent"``: have the kernel make some of common memory (Linux 6.1, prefaults, about 3 s
                per GiB). Direct I/O of large blocks then has few pieces.
            numa_node: bind it to this NUMA node.
            driver: take it from this driver's own memory, such as the pool of ``cxl``, whose options then
                decide on pages and node; None: as ``allocate_from`` says; empty: main memory.

        Raises MemoryUnavailable with the remedy, ConfigError.
        """
        number(nbytes, "nbytes")
        flag(prefault, "prefault")
        if not isinstance(huge_pages, str):
            flag(huge_pages, "huge_pages")
        numa_node = None if numa_node is None else number(numa_node, "numa_node")
        place = self.config.allocate_from if driver is None else text(driver, "driver", "cxl")
        pages = {"prefault": prefault, "huge_pages": huge_pages, "numa_node": numa_node}
        return self._register(lambda name: allocate(self.config, place, nbytes, name, pages), name)

    def register(self, memory: object, *, name: str = "") -> Region:
        """Register memory in place, without a copy.

        Takes a numpy array, a torch tensor, a bytearray or any writable contiguous buffer; what has
        ``__dlpack__`` or ``__cuda_array_interface__``, in main or GPU memory; a MemoryRange (address and
        length); a FileSource (a file or block device); a DeviceSource (one that only a driver reaches). The
        region keeps it alive until closed. Raises ConfigError when it is no such memory, RegionOverlap,
        DriverUnavailable when no driver takes its kind.
        """
        if isinstance(memory, FileSource):
            return self._register(lambda _: file_source(memory), name)
        if isinstance(memory, DeviceSource):
            return self._register(lambda _: device_source(memory), name)
        return self._register(lambda _: wrap(memory), name)

    def register_many(self, memories: Sequence[object], *, names: Sequence[str] = ()) -> list[Region]:
        """Register several memories in parallel, all or none; see ``register``.

        Pinning memory for a NIC takes seconds per 100 GB and uses one core per call. Raises what the first
        failure raises, after closing what was registered.
        """
        self._require_open()
        for sequence, argument in ((memories, "memories"), (names, "names")):
            if not isinstance(sequence, Sequence) or isinstance(sequence, str | bytes):
                raise wrong(argument, sequence, "a list or tuple")
        if names and len(names) != len(memories):
            raise ConfigError(f"{len(names)} names for {len(memories)} memories; give each one, or none")
        made: list[Region] = []

        def register(memory: object, name: str) -> Region:
            made.append(self.register(memory, name=name))
            return made[-1]

        threads = max(1, min(len(memories), os.cpu_count() or 1))
        with ThreadPoolExecutor(threads, "mooncake-register") as pool:
            try:
                return list(pool.map(register, memories, names or [""] * len(memories)))
            except BaseException:  # also Ctrl-C, at any moment
                pool.shutdown(cancel_futures=True)
                for region in made:
                    region.close()
                raise

    def _register(self, source: Callable[[str], Memory], name: str) -> Region:
        self._require_open()
        region_id = next(self._region_ids)
        name = region_name(name, "name") or f"region-{region_id}"
        memory, key = source(name), secrets.token_bytes(16)
        try:
            self._ranges.add(region_id, memory, name)
            core = self._core.register_region(
                memory.kind,
                memory.device,
                memory.address,
                memory.nbytes,
                memory.fd,
                memory.fd_offset,
                memory.numa_node,
                region_id,
                key,
                name,
                memory.location,
            )
        except BaseException:
            self._ranges.remove(region_id)
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
        found = decode_descriptor(descriptor)
        peer = self.connect(found.address, timeout_s=timeout_s)
        if peer.epoch != found.epoch:
            raise PeerRestarted(
                f"region {found.name!r} is gone: another process now answers at {found.address}"
            )
        core = self._core.import_region(
            peer._require_core(), found.name, found.region_id, found.key, found.length, found.keys
        )
        return RemoteRegion(core, found, peer)

    def _describe(self, region: Region) -> bytes:
        region._require_access("rw")
        return self._encode_descriptor(
            region, region.key, self._core.export_keys(region._require_core()), "rw"
        )

    def _grant(self, region: Region, access: Access) -> bytes:
        self._require_owner()
        rights = ACCESS_BITS[one_of(access, "access", ("rw", "r", "w"))]
        region._require_access(access)
        key = secrets.token_bytes(16)
        keys = self._core.grant(region._require_core(), key, rights)
        region._granted[key] = access
        return self._encode_descriptor(region, key, keys, access)

    def _revoke(self, region: Region, descriptor: bytes, timeout_s: float | None) -> None:
        self._require_owner()
        found = decode_descriptor(descriptor)
        if found.key == region.key:
            raise ConfigError(
                f"this is the own key of region {region.name!r}, which ends with its close(); "
                "descriptor('r'), descriptor('w') and grant() make keys that can be revoked"
            )
        if found.key not in region._granted and found.key not in region._revoking:
            raise ConfigError(
                f"this descriptor of region {found.name!r} was not made by grant(), descriptor('r') or "
                f"descriptor('w') of region {region.name!r}, or was revoked already"
            )
        limit_s = self._limit_s(timeout_s, self.config.close_timeout_s)
        core = region._require_core()
        region._revoking.add(found.key)
        region._granted.pop(found.key, None)  # at once: checksums are told to nobody who has it
        self._core.revoke(core, found.key, limit_s)
        region._revoking.discard(found.key)

    def _encode_descriptor(
        self, region: Region, key: bytes, keys: _wire.DRIVER_BLOBS, access: Access
    ) -> bytes:
        owner = (_wire.PROTOCOL, self.address, self.epoch)
        kind = region.kind.name
        described = _wire.Descriptor(*owner, region.name, region._id, key, region.nbytes, keys, access, kind)
        return msgspec.msgpack.encode(described)

    def _close_region(self, region: Region, timeout_s: float | None, in_use: str) -> None:
        core = region._core
        if core is None or os.getpid() != self._owner_pid:  # a forked child: it is the parent's
            return
        one_of(in_use, "in_use", ("wait", "refuse"))
        limit_s = self._limit_s(timeout_s, self.config.close_timeout_s)
        if in_use == "wait":  # nobody shall find what is about to go
            self._directory.withdraw(region)
        self._core.close_region(core, limit_s, in_use == "refuse")
        self._directory.withdraw(region)
        with self._lock:
            if self._regions.pop(region._id, None) is None:
                return
        self._ranges.remove(region._id)
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
        if not is_address(text(address, "address", "127.0.0.1:7000")):
            limit_s = self._limit_s(timeout_s, self.config.connect_timeout_s)
            return self._directory.connect(address, lambda at, s: self.connect(at, timeout_s=s), limit_s)
        host, port = split_address(address)
        limit_s = self._limit_s(timeout_s, self.config.connect_timeout_s)
        return self._peers.reach(address, lambda left_s: self._connect(host, port, address, left_s), limit_s)

    def _connect(self, host: str, port: int, address: str, limit_s: float) -> Peer:
        own = self.config.host if "%" in self.config.host else self.config.advertise_host
        connection, body = self._channel.connect(with_interface(host, own), port, limit_s)
        try:
            theirs = _wire.protocol_of(body)
            if theirs is not None:
                check_protocol(theirs, f"the engine at {address}")
            hello = msgspec.msgpack.decode(body, type=_wire.Hello)
        except PeerIncompatible:
            self._channel.disconnect(connection)
            raise
        except msgspec.MsgspecError as error:
            self._channel.disconnect(connection)
            raise PeerUnreachable(
                f"{address} answers with something that is no engine's hello: {error}"
            ) from None
        return Peer(self, self._channel, connection, address, hello)

    def serve(self, method: str, handler: Handler) -> None:
        """Answer ``Peer.call`` and take ``Peer.notify`` of ``method`` with ``handler(payload, caller)``.

        Calls run on ``handler_threads`` threads, notifications one after another in order. While all of the
        threads are busy, further calls wait; what engines ask each other has a thread of its own. What a
        handler raises reaches the caller as RemoteError. It returns bytes, or what has the buffer protocol,
        or None for no bytes. Raises ConfigError when the method has a handler.
        """
        self._require_open()
        self._dispatcher.serve(method, handler)

    def serve_compiled(self, method: str, handler: object) -> None:
        """Answer ``Peer.call`` of ``method`` by compiled code, without the interpreter.

        It runs on the thread that has read the request, so that none has to wake up for it, and holds up
        every peer of this engine meanwhile: it must be quick.

        Args:
            handler: a PyCapsule with a ``mc_handler_v1``, see ``abi/mooncake_handler.h``; kept for good.

        Raises ConfigError for anything else, and when the method has a handler.
        """
        self._require_open()
        self._dispatcher.serve_compiled(method, handler)

    def compiled_calls(self) -> object:
        """Return what compiled code of other packages asks peers and moves bytes by, without the interpreter.

        A PyCapsule with a ``mc_calls_v1``, see ``abi/mooncake_calls.h``; it keeps the engine's core. What it
        moves is not compared (``TransferConfig.integrity``).
        """
        self._require_open()
        return compiled_calls(self._core)

    def on_peer_lost(self, handler: LostHandler) -> None:
        """Call ``handler(caller)`` once for each peer whose connection here ends: it died or closed.

        It runs after all of that connection's calls were answered, so it sees their effects.
        """
        self._require_open()
        self._dispatcher.on_peer_lost(handler)

    def publish(self, region: Region, *, name: str = "", access: Access = "rw") -> None:
        """Let peers find ``region`` as ``engine-name/name`` (default: the region's own name).

        Who can read the registry then may do with it what ``access`` says. The name is taken back when the
        region or the engine is closed, and expires when the process dies. A registry that does not answer
        gets it later. Raises ConfigError when the engine has no name, or the region is another's; and as
        ``Region.descriptor`` does.
        """
        self._require_open()
        instance(region, Region, "region", "as allocate() and register() return")
        if region._engine is not self:
            raise ConfigError(
                f"region is {region.name!r}, which is registered with another engine; publish it there"
            )
        self._directory.publish(region, region_name(name, "name") or region.name, region.descriptor(access))

    def withdraw(self, region: Region | str) -> None:
        """Take a published region back under all its names, or under the one name that is given.

        Peers that found it keep it; ``Region.close`` and ``revoke`` end that. Does not wait for the registry;
        a region that is not published is left as it is.
        """
        self._require_open()
        if not isinstance(region, str):
            instance(region, Region, "region", "or the name it was published under")
        self._directory.withdraw(region)

    def find_region(self, path: str, *, timeout_s: float | None = None) -> RemoteRegion:
        """Reach the region that a peer published: ``engine-name/region-name``.

        Raises NameUnknown, RegistryUnavailable, and as ``import_region`` does.
        """
        self._require_open()
        text(path, "path", "prefill-0/kv")
        limit_s = self._limit_s(timeout_s, self.config.connect_timeout_s)
        return self._directory.find_region(path, lambda d, s: self.import_region(d, timeout_s=s), limit_s)

    # ---- transfers

    def read(
        self, local: Region, remote: RemoteRegion, blocks: Blocks, **options: Unpack[PostOptions]
    ) -> Transfer:
        """Start copying from ``remote`` into ``local``; never blocks on the peer.

        ``blocks``: N x 3 array of uint64, rows of local offset, remote offset and length in bytes, or a Grid.
        Contiguous rows are moved as one; empty ones are skipped. The keyword arguments are those of
        ``Transfer.post``. Raises RegionRefused for a range outside a region, RegionClosed, NoRoute,
        ConfigError.
        """
        return Transfer(self, False, local, remote, blocks).post(**options)

    def write(
        self, local: Region, remote: RemoteRegion, blocks: Blocks, **options: Unpack[PostOptions]
    ) -> Transfer:
        """Start copying from ``local`` into ``remote``; otherwise as ``read``."""
        return Transfer(self, True, local, remote, blocks).post(**options)

    def prepare_read(self, local: Region, remote: RemoteRegion, blocks: Blocks) -> Transfer:
        """As ``read``, but starts nothing: ``Transfer.post()`` does, as often as wanted, at little cost."""
        return Transfer(self, False, local, remote, blocks)

    def prepare_write(self, local: Region, remote: RemoteRegion, blocks: Blocks) -> Transfer:
        """As ``write``, but starts nothing; see ``prepare_read``."""
        return Transfer(self, True, local, remote, blocks)

    def enable_driver(self, name: str) -> None:
        """Let transfers of this engine use a driver again that ``disable_driver()`` took away.

        Raises ConfigError for one that this engine has not opened; see ``TransferConfig.drivers``.
        """
        self._require_open()
        self._core.enable_driver(text(name, "name", "tcp"), True)

    def disable_driver(self, name: str) -> None:
        """Let transfers of this engine use other drivers only, from the next slice on, while it runs.

        What the driver has under way ends as it is; what no other driver can carry ends with NoRoute. Peers
        reach this engine over it all the same. Raises ConfigError as ``enable_driver`` does.
        """
        self._require_open()
        self._core.enable_driver(text(name, "name", "tcp"), False)

    def rails(self) -> list[RailStatus]:
        """Every rail to every peer that stands, or that regions or transfers of this engine refer to."""
        self._require_owner()
        self._peers.forget_lost()
        return [msgspec.convert(row, RailStatus) for row in self._core.rails()]

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters by driver (and device, where it has several).

        Each has connections, ops, bytes_read, bytes_written, errors, refused and faults (what the driver's
        contract forbids), and of notifications that came with bytes notices_sent, notices_received and
        notices_dropped (twice, or of nobody known here).
        """
        self._require_owner()
        return self._core.stats()

    # ---- life

    def close(self) -> None:
        """End every transfer (EngineClosed), revoke every region, leave no thread. Safe to call twice.

        Ctrl-C does not leave it half closed: KeyboardInterrupt is raised when all of it is done.
        """
        with ExitStack() as steps:
            steps.callback(self._forget_regions)
            steps.callback(self._finalizer)
            if hasattr(self, "_leave_directory"):
                steps.callback(self._leave_directory)

    def _forget_regions(self) -> None:
        with self._lock:
            regions, self._regions = list(self._regions.values()), {}
        for region in regions:
            region._core = None
            region._memory.close()
        self._peers.clear()

    def _require_open(self) -> None:
        self._require_owner()
        if not self._finalizer.alive:
            raise EngineClosed("the engine has been closed; make a new one")

    def _require_owner(self) -> None:
        # Here, before any lock is asked for: another thread of the parent may have held it at the fork.
        if os.getpid() != self._owner_pid:
            raise EngineForked("this engine belongs to the parent process; make a new one in this process")

    @staticmethod
    def _limit_s(given_s: float | None, default_s: float) -> float:
        return default_s if given_s is None else seconds(given_s, "timeout_s")

    def __enter__(self) -> TransferEngine:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _leave(directory: Directory, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        directory.close()


class _Helper(Protocol):
    """Threads of the engine that end when channel and core are closed."""

    def stop(self) -> None: ...


def _shut_down(channel: Channel, core: CoreEngine, helpers: tuple[_Helper, ...], owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return  # a forked child: threads, sockets and regions are its parent's
    with ExitStack() as steps:  # Ctrl-C in one step shows when the others are done
        for helper in reversed(helpers):
            steps.callback(helper.stop)
        steps.callback(core.close)
        steps.callback(channel.close)
