"""Registered memory, of this engine and of peers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mooncake_transfer._core import Region as CoreRegion
from mooncake_transfer._core import RemoteRegion as CoreRemoteRegion
from mooncake_transfer._errors import RegionClosed
from mooncake_transfer.memory import Memory

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.peer import Peer

__all__ = ["Region", "RemoteRegion"]


class Region:
    """Memory of this process that transfers may use and peers with its descriptor may reach.

    The engine keeps it, and its memory, until ``close()``. Thread-safe.

    Attributes:
        name: what messages call it.
        nbytes: its size in bytes.
        address: its first byte, as an integer.
        key: the 16 random bytes that a peer must present; new for every registration.
    """

    def __init__(
        self, engine: TransferEngine, core: CoreRegion, memory: Memory, name: str, region_id: int, key: bytes
    ):
        self._engine = engine
        self._core: CoreRegion | None = core
        self._memory = memory
        self._id = region_id
        self.name = name
        self.nbytes = memory.nbytes
        self.address = memory.address
        self.key = key

    def view(self) -> memoryview:
        """The bytes, writable, without a copy. It stays valid after ``close()``, as private memory."""
        array = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        array._owner = self._memory.owner  # type: ignore[attr-defined]  # the view keeps the memory alive
        return memoryview(array).cast("B")

    def descriptor(self) -> bytes:
        """What a peer needs to reach this region; who holds it may read and write it. A few hundred bytes.

        Raises RegionClosed.
        """
        return self._engine._describe(self)

    def close(self, timeout_s: float | None = None) -> None:
        """Give the memory back when nobody touches it any more. Safe to call twice.

        It takes no new transfers of this engine at once. When those in flight have ended, the key is revoked
        and what peers have begun is waited for. Raises RegionBusy when either lasts longer than ``timeout_s``
        (default: ``close_timeout_s`` of the configuration); ``close()`` may then be called again, and what
        was revoked stays so.
        """
        self._engine._close_region(self, timeout_s)

    def _require_core(self) -> CoreRegion:
        if self._core is None:
            raise RegionClosed(f"region {self.name!r} was closed; register its memory again")
        return self._core


class RemoteRegion:
    """A region of a peer, as this engine reaches it.

    Attributes:
        name: what its owner calls it.
        nbytes: its size in bytes.
        peer: the engine it belongs to.
    """

    def __init__(self, core: CoreRemoteRegion, name: str, nbytes: int, peer: Peer):
        self._core: CoreRemoteRegion | None = core
        self.name = name
        self.nbytes = nbytes
        self.peer = peer

    def close(self) -> None:
        """Forget it. Transfers in flight finish. Safe to call twice."""
        self._core = None

    def _require_core(self) -> CoreRemoteRegion:
        if self._core is None:
            raise RegionClosed(
                f"remote region {self.name!r} of {self.peer.address} was closed; import it again"
            )
        return self._core
