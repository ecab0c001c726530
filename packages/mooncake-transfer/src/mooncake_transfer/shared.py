"""Memory that several processes of one host see at the same time, found by a name.

::

    segment = SharedSegment.offer(engine.allocate(1 << 30), "weights")     # in one process
    segment.view()[:5] = b"hello"

    segment = SharedSegment.open("weights")                                # in others
    assert bytes(segment.view()[:5]) == b"hello"

Transfers check a key and a range; who maps memory needs neither, so this is for processes of one user that
trust each other. Nothing has a name in any file system: the name goes with the process that offers it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from mooncake_transfer._arguments import instance, number, seconds, text, wrong
from mooncake_transfer._errors import ConfigError, NameUnknown, PeerUnreachable, RegionClosed, RegionRefused
from mooncake_transfer.memory import Memory, node_of
from mooncake_transfer.region import Region

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine

__all__ = ["SharedSegment"]

ANSWER = struct.Struct("<QQ")  # bytes, and where they begin in the file
CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
PAUSE_S = 0.02
ANSWER_S = 5.0  # for who has connected to take the descriptor
JOIN_S = 5.0


def _place(name: str) -> str:
    if not text(name, "name", "weights") or len(name.encode()) > 64:
        raise ConfigError(f"name is {name!r}; it must have 1 to 64 bytes")
    return (
        f"\0mooncake-segment/{os.geteuid()}/{name}"  # abstract: in no file system, of this network namespace
    )


def _is_ours(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


class SharedSegment:
    """One such memory, as one process sees it. Thread-safe.

    Attributes:
        name: under which processes of this user and host open it.
        nbytes: its size in bytes.
        region: the region of this process's engine that it is; None when it was opened without an engine.
    """

    def __init__(self, name: str, nbytes: int, region: Region | None, owner: object):
        self.name = name
        self.nbytes = nbytes
        self.region = region
        self._owner = owner
        self._door: _Door | None = None
        self._closed = False

    @classmethod
    def offer(cls, region: Region, name: str) -> SharedSegment:
        """Let processes of this user and host map a region that ``engine.allocate()`` made.

        They may read and write all of it as long as they live, whatever becomes of this process. Raises
        ConfigError for memory that cannot be mapped and for a name that somebody has, RegionClosed.
        """
        instance(region, Region, "region", "as allocate() returns")
        region._require_core()
        if region._memory.fd < 0 or not region.address:
            raise ConfigError(
                f"region {region.name!r} cannot be mapped by others; offer memory of engine.allocate()"
            )
        segment = cls(name, region.nbytes, region, region._memory.owner)
        segment._door = _Door(_place(name), name, region)
        return segment

    @classmethod
    def open(
        cls, name: str, *, engine: TransferEngine | None = None, timeout_s: float = 5.0
    ) -> SharedSegment:
        """Map the memory that another process offers, waiting for it at most ``timeout_s``.

        With ``engine`` it is registered there too, so that peers reach it through this process; see
        ``region``. Raises NameUnknown when nobody offers it, RegionRefused when that is another user,
        PeerUnreachable when who does gives no answer.
        """
        deadline_s = time.monotonic() + seconds(timeout_s, "timeout_s")
        if engine is not None and not callable(getattr(engine, "register", None)):
            raise wrong("engine", engine, "a TransferEngine, or None")
        fd, nbytes, offset = _ask(_place(name), name, deadline_s)
        try:
            mapping = mmap.mmap(fd, nbytes, offset=offset)
        finally:
            if engine is None:
                os.close(fd)
        if engine is None:
            return cls(name, nbytes, None, mapping)
        address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        memory = Memory(address, nbytes, mapping, fd, offset, numa_node=node_of(address, nbytes))
        return cls(name, nbytes, engine.register(memory, name=name), mapping)

    def view(self) -> memoryview:
        """The bytes, writable, without a copy: what one process writes, all see. Raises RegionClosed."""
        if self._closed:
            raise RegionClosed(f"segment {self.name!r} was closed in this process")
        if isinstance(self._owner, mmap.mmap):
            return memoryview(self._owner)
        assert self.region is not None
        return self.region.view()

    def part(self, rank: int, world_size: int) -> memoryview:
        """The share of one of ``world_size`` ranks: equal ones, in order, what is left over unused."""
        if not 0 <= number(rank, "rank") < number(world_size, "world_size", least=1):
            raise ConfigError(f"rank is {rank}; it must be 0 to world_size - 1, {world_size - 1}")
        share = self.nbytes // world_size
        return self.view()[rank * share : (rank + 1) * share]

    def close(self) -> None:
        """Let nobody else open it, and give back this process's region. Safe to call twice.

        Views stay valid, and so does what other processes have mapped. Raises as ``Region.close`` does.
        """
        self._closed = True
        if self._door is not None:
            self._door.close()
        if self.region is not None:
            self.region.close()

    def __enter__(self) -> SharedSegment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Door:
    """Hands the descriptor of a region's memory to who asks under its name."""

    def __init__(self, place: str, name: str, region: Region):
        self._fd = os.dup(region._memory.fd)
        self._answer = ANSWER.pack(region.nbytes, region._memory.fd_offset)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.getpid()
        try:
            self._listener.bind(place)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            os.close(self._fd)
            raise ConfigError(
                f"segment {name!r} cannot be offered: {error.strerror}; close who offers it, or take "
                "another name"
            ) from None
        self._thread = threading.Thread(target=self._run, name=f"mooncake-segment {name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it was closed
                break
            with connection, contextlib.suppress(OSError):  # who asked is gone, and will not ask again
                connection.settimeout(ANSWER_S)
                if _is_ours(connection):
                    socket.send_fds(connection, [self._answer], [self._fd])
        os.close(self._fd)

    def close(self) -> None:
        if self._pid == os.getpid() and self._thread.is_alive():
            with contextlib.suppress(OSError):  # a second time
                self._listener.shutdown(socket.SHUT_RDWR)  # ends accept(), which close() alone does not
            self._thread.join(JOIN_S)
        self._listener.close()


def _ask(place: str, name: str, deadline_s: float) -> tuple[int, int, int]:
    with _reach(place, name, deadline_s) as connection:
        if not _is_ours(connection):
            raise RegionRefused(f"segment {name!r} is offered by a process of another user")
        connection.settimeout(max(deadline_s - time.monotonic(), PAUSE_S))
        try:
            answer, fds, _, _ = socket.recv_fds(connection, ANSWER.size, 1)
        except OSError as error:
            raise PeerUnreachable(f"who offers segment {name!r} does not answer: {error}") from None
    if len(fds) != 1 or len(answer) != ANSWER.size:
        raise RegionRefused(f"who offers segment {name!r} does not hand it to this user")
    nbytes, offset = ANSWER.unpack(answer)
    return fds[0], nbytes, offset


def _reach(place: str, name: str, deadline_s: float) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(max(deadline_s - time.monotonic(), PAUSE_S))
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            if time.monotonic() + PAUSE_S >= deadline_s:
                raise NameUnknown(
                    f"no process of this user offers segment {name!r} on this host "
                    f"({error.strerror or error}); containers with a network namespace of their own do not "
                    "see each other's"
                ) from None
        time.sleep(PAUSE_S)
