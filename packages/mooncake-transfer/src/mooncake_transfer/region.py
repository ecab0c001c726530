"""Registered memory, of this engine and of peers."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from mooncake_transfer._core import Region as CoreRegion
from mooncake_transfer._core import RemoteRegion as CoreRemoteRegion
from mooncake_transfer._descriptors import decode_descriptor
from mooncake_transfer._errors import ConfigError, RegionClosed
from mooncake_transfer._mapping import map_peer
from mooncake_transfer._wire import Descriptor
from mooncake_transfer.memory import Memory, MemoryKind

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.peer import Peer

__all__ = ["Access", "Region", "RemoteRegion"]

Access = Literal["rw", "r", "w"]


class Region:
    """Memory of this process that transfers may use and peers with its descriptor may reach.

    The engine keeps it, and its memory, until ``close()``. Thread-safe.

    Attributes:
        name: what messages call it.
        nbytes: its size in bytes.
        address: its first byte, as an integer; 0 for files and block devices.
        kind: what it is: DRAM, CUDA, FILE or BLOCK.
        device: ordinal of the accelerator that holds it, -1 for everything else.
        numa_node: the NUMA node it lies on, -1 when unknown.
        key: the 16 random bytes of its full rights; new for every registration.
    """

    def __init__(
        self, engine: TransferEngine, core: CoreRegion, memory: Memory, name: str, region_id: int, key: bytes
    ):
        self._engine = engine
        self._core: CoreRegion | None = core
        self._memory = memory
        self._id = region_id
        self._granted: dict[bytes, str] = {}
        self._revoking: set[bytes] = set()  # revoked, and perhaps still used by peers
        self.name = name
        self.nbytes = memory.nbytes
        self.address = memory.address
        self.kind = memory.kind
        self.device = memory.device
        self.numa_node = memory.numa_node
        self.key = key

    def view(self) -> memoryview:
        """The bytes, writable, without a copy. It stays valid after ``close()``, as private memory.

        Raises ConfigError when they are not in main memory.
        """
        if self.kind is not MemoryKind.DRAM:
            raise ConfigError(
                f"region {self.name!r} is of kind {self.kind.name}; only main memory has a view"
            )
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array._owner = self._memory.owner  # type: ignore[attr-defined]  # the view keeps the memory alive
        return memoryview(array).cast("B")

    def descriptor(self, access: Access = "rw") -> bytes:
        """What a peer needs to reach this region; who holds it may do what ``access`` says, no more.

        A few hundred bytes, for any channel that only those see who may have it. ``rw`` is the region's own
        key, and always the same; ``r`` and ``w`` are new keys at every call, which ``revoke()`` takes back
        one by one. Raises RegionClosed, DriverUnavailable when no driver can limit rights, ConfigError for
        ``rw`` and ``w`` of a FileSource that is not writable.
        """
        if access == "rw":
            return self._engine._describe(self)
        return self.grant(access)

    def grant(self, access: Access = "rw") -> bytes:
        """As ``descriptor()``, but always with a key of its own, which ``revoke()`` can take back."""
        return self._engine._grant(self, access)

    def revoke(self, descriptor: bytes, timeout_s: float | None = None) -> None:
        """Take back a descriptor that ``grant()`` made: who holds it is refused from now on.

        Returns when no transfer under it touches the memory any more. Raises RegionBusy when that lasts
        longer than ``timeout_s`` (default: ``close_timeout_s``; it stays revoked), ConfigError when it is no
        such descriptor of this region; the region's own key ends with ``close()``.
        """
        self._engine._revoke(self, descriptor, timeout_s)

    def ways(self, descriptor: bytes) -> frozenset[tuple[str, str]]:
        """Driver and device of all that reach this region for who holds this descriptor of it.

        With a key of its own they may be fewer than with the region's: ``grant()`` leaves out drivers that
        cannot make one, or not now. Raises ConfigError for what is no descriptor of a region.
        """
        found = decode_descriptor(descriptor)
        return frozenset((driver, device) for driver, device, _ in found.keys)

    def close(self, timeout_s: float | None = None, *, in_use: Literal["wait", "refuse"] = "wait") -> None:
        """Give the memory back when nobody touches it any more. Safe to call twice.

        It takes no new transfers, of this engine or of peers, at once; those in flight are waited for. Raises
        RegionBusy when they last longer than ``timeout_s`` (default: ``close_timeout_s`` of the
        configuration); ``close()`` may then be called again, and what was revoked stays so. With ``in_use``
        ``refuse``, transfers of this engine make it raise RegionBusy at once, and nothing has changed. It
        does not spare peers: one-sided operations are seen by no owner, and drivers know of them only once
        the key is gone. So peers are refused and what they have under way is waited for in both cases.
        """
        self._engine._close_region(self, timeout_s, in_use)

    def _require_access(self, access: Access) -> None:
        if "w" in access and not self._memory.writable:
            raise ConfigError(
                f"region {self.name!r} is opened for reading only, so access {access!r} cannot be given; "
                "take descriptor('r'), or register it with FileSource(writable=True)"
            )

    def _require_core(self) -> CoreRegion:
        if self._core is None:
            raise RegionClosed(f"region {self.name!r} was closed; register its memory again")
        return self._core

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RemoteRegion:
    """A region of a peer, as this engine reaches it.

    Attributes:
        name: what its owner calls it.
        nbytes: its size in bytes.
        peer: the engine it belongs to.
        access: what its descriptor allows: ``rw``, ``r`` or ``w``.
        kind: what it is: DRAM, CUDA, FILE or BLOCK; None when its descriptor is of an engine that did not say
            so yet, or says something that this one does not know.
    """

    def __init__(self, core: CoreRemoteRegion, found: Descriptor, peer: Peer):
        self._core: CoreRemoteRegion | None = core
        self._id = found.region_id
        self._key = found.key
        self.access = found.access
        self.kind = MemoryKind.__members__.get(found.kind)
        self.name = found.name
        self.nbytes = found.length
        self.peer = peer

    def map(self) -> memoryview:
        """Return the region as memory of this process, read-only: what its owner writes is seen.

        For peers on this host, and of this user; it stays mapped as long as somebody has the view, whatever
        becomes of the owner, the key and this region. Whether the bytes are what they should be is between
        the owner and the caller. Raises NoRoute where the memory cannot be mapped, RegionRefused for a key
        that may not read, PeerUnreachable, CallTimeout.
        """
        self._require_core()
        return memoryview(map_peer(self.peer, self.name, self._id, self._key, self.nbytes))

    def close(self) -> None:
        """Forget it. Transfers in flight finish. Safe to call twice."""
        self._core = None

    def _require_core(self) -> CoreRemoteRegion:
        if self._core is None:
            raise RegionClosed(
                f"remote region {self.name!r} of {self.peer.address} was closed; import it again"
            )
        return self._core
