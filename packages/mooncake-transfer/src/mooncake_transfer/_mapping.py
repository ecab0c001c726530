"""Memory of peers on this host, seen by this process itself: no bytes move.

Who shows a key that may read a region is told which open file of the owner's process its memory is; the
kernel lets processes of the same user (with the same view of processes) open that, here for reading only.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mooncake_transfer import _wire
from mooncake_transfer._errors import NoRoute, RegionRefused, RemoteError
from mooncake_transfer._integrity import readable_region
from mooncake_transfer.peer import Caller, Peer

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

MAP_METHOD = "mooncake.map"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")


class Mappings:
    """Handler of MAP_METHOD."""

    def __init__(self, engine: weakref.ref[TransferEngine]):
        self._engine = engine

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        """Answer one query."""
        query = msgspec.msgpack.decode(body, type=_wire.MapQuery)
        region = readable_region(self._engine(), query.region_id, query.key)
        memory = region._memory
        if memory.fd < 0 or not region.address:
            raise NoRoute(
                f"region {region.name!r} is no memory that others can map; engine.allocate() makes such"
            )
        file = os.fstat(memory.fd)
        place = (os.getpid(), memory.fd, memory.fd_offset, file.st_dev, file.st_ino)
        return msgspec.msgpack.encode(_wire.MapAnswer(*_where(), *place))


def map_peer(peer: Peer, name: str, region_id: int, key: bytes, nbytes: int) -> mmap.mmap:
    """A peer's region as memory of this process, read-only. See ``RemoteRegion.map``."""
    what = f"region {name!r} of {peer.address}"
    try:
        body = peer.call(MAP_METHOD, msgspec.msgpack.encode(_wire.MapQuery(region_id, key)))
    except RemoteError as error:
        if error.kind == RegionRefused.__name__:
            raise RegionRefused(f"{what} cannot be mapped: {error.message}") from None
        raise NoRoute(f"{what} cannot be mapped: {error.message}") from None
    found = msgspec.msgpack.decode(body, type=_wire.MapAnswer)
    if (found.host, found.processes) != _where():
        raise NoRoute(f"{what} is on another host, or in another container; its memory cannot be mapped")
    try:
        fd = os.open(f"/proc/{found.pid}/fd/{found.fd}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NoRoute(
            f"{what} cannot be mapped: {error.strerror}; its process is gone, or of another user"
        ) from None
    try:
        file = os.fstat(fd)
        if (file.st_dev, file.st_ino) != (found.device, found.inode):
            raise NoRoute(f"{what} cannot be mapped: it was closed meanwhile")
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=found.offset)
    except (OSError, ValueError) as error:
        raise NoRoute(f"{what} cannot be mapped: {error}") from None
    finally:
        os.close(fd)


def _where() -> tuple[str, int]:
    return BOOT_ID.read_text().strip(), PROCESSES.stat().st_ino
