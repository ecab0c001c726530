"""The driver's C function table, called from Python: what the engine sees, without the engine.

Only for tests. ``Endpoint`` wraps the calls that they need; every wait has a deadline.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from mooncake_driver_shm import plugin

OK, AGAIN, INVALID, UNSUPPORTED, UNREACHABLE, REFUSED, CANCELLED, TIMEOUT, CLOSED = 0, 1, 2, 3, 5, 6, 7, 8, 10
READ, WRITE = 0, 1
MAY_READ, MAY_WRITE = 1, 2
KEY_BYTES = 16
BLOB_MAX = 1024
DEADLINE_S = 30.0

U32, U64, I32, SIZE, PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p


class Memory(ctypes.Structure):
    """mc_memory."""

    _fields_ = [
        ("struct_size", U32),
        ("kind", U32),
        ("device", I32),
        ("fd", I32),
        ("fd_offset", U64),
        ("address", U64),
        ("length", U64),
        ("region_id", U64),
        ("key", ctypes.c_uint8 * KEY_BYTES),
        ("numa_node", I32),
        ("reserved", U32),
    ]


class Op(ctypes.Structure):
    """mc_op."""

    _fields_ = [
        ("opcode", U32),
        ("flags", U32),
        ("connection", U64),
        ("local", U64),
        ("remote", U64),
        ("local_offset", U64),
        ("remote_offset", U64),
        ("length", U64),
        ("cookie", U64),
    ]


class Completion(ctypes.Structure):
    """mc_completion."""

    _fields_ = [("cookie", U64), ("bytes", U64), ("status", I32), ("reason", ctypes.c_char * 200)]


class Option(ctypes.Structure):
    """mc_option."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


FUNCTIONS = [
    *("open", "close", "caps", "stats", "last_error", "export_address", "connect", "disconnect"),
    *("register_memory", "deregister_memory", "export_key", "import_key", "release_key"),
    *("submit", "poll", "event_fd", "arm", "cancel", "grant", "revoke", "submit_on_stream"),
    *("late_writes", "fence", "notify", "poll_notices"),
]


class Table(ctypes.Structure):
    """mc_driver_v1."""

    _fields_ = [("abi_major", U32), ("abi_minor", U32), ("struct_size", SIZE), ("name", ctypes.c_char_p)] + [
        (name, PTR) for name in FUNCTIONS
    ]


def _table() -> Table:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = PTR, [ctypes.py_object, ctypes.c_char_p]
    return Table.from_address(pointer(plugin.load(), b"mooncake.driver.v1"))


def _call(name: str, *arguments: object) -> int:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(type(argument) for argument in arguments))
    return int(kind(getattr(_table(), name))(*arguments))


def last_error() -> str:
    """Why the last call of this thread failed."""
    return str(ctypes.CFUNCTYPE(ctypes.c_char_p)(_table().last_error)().decode())


class Failed(Exception):
    """A call of the table failed; ``code`` is its mc_status."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}: {last_error()}")
        self.code = code


def check(name: str, *arguments: object) -> None:
    """Call a function of the table; raise Failed when it does not return MC_OK."""
    if (code := _call(name, *arguments)) != OK:
        raise Failed(name, code)


def deadline_ns(seconds: float) -> ctypes.c_uint64:
    """A deadline of the ABI."""
    return U64(time.monotonic_ns() + int(seconds * 1e9))


def _key(key: bytes) -> ctypes.c_void_p:
    assert len(key) == KEY_BYTES
    return ctypes.cast(ctypes.c_char_p(key), PTR)


class Endpoint:
    """One endpoint of the driver."""

    def __init__(self, **options: object) -> None:
        given = (Option * len(options))(
            *((name.encode(), str(value).lower().encode()) for name, value in options.items())
        )
        self.handle = U64()
        check("open", PTR(ctypes.addressof(given)), SIZE(len(options)), ctypes.pointer(self.handle))
        self._memory: list[tuple[mmap.mmap, ctypes.c_char, int]] = []

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the endpoint and give its memory back. Safe to call twice."""
        if self.handle.value:
            ctypes.CFUNCTYPE(None, U64)(_table().close)(self.handle)
            self.handle = U64()
        while self._memory:
            memory, hold, descriptor = self._memory.pop()
            del hold
            memory.close()
            os.close(descriptor)

    def allocate(
        self, nbytes: int, region_id: int, key: bytes, *, shareable: bool = True
    ) -> tuple[int, memoryview]:
        """Register a memfd (or the same memory without its descriptor); return handle and bytes."""
        descriptor = os.memfd_create("driver-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(descriptor, nbytes)
        hold = ctypes.c_char.from_buffer(memory)
        self._memory.append((memory, hold, descriptor))
        what = Memory(
            struct_size=ctypes.sizeof(Memory),
            fd=descriptor if shareable else -1,
            address=ctypes.addressof(hold),
            length=nbytes,
            region_id=region_id,
            key=(ctypes.c_uint8 * KEY_BYTES)(*key),
            numa_node=-1,
        )
        registered = U64()
        check("register_memory", self.handle, ctypes.pointer(what), ctypes.pointer(registered))
        return registered.value, memoryview((ctypes.c_char * nbytes).from_buffer(memory)).cast("B")

    def address(self) -> bytes:
        """What a peer needs to connect."""
        blob, length = ctypes.create_string_buffer(BLOB_MAX), SIZE(BLOB_MAX)
        check("export_address", self.handle, PTR(ctypes.addressof(blob)), ctypes.pointer(length))
        return blob.raw[: length.value]

    def connect(self, address: bytes) -> int:
        """Begin a connection."""
        connection = U64()
        pointer = ctypes.cast(ctypes.c_char_p(address), PTR)
        check("connect", self.handle, pointer, SIZE(len(address)), ctypes.pointer(connection))
        return connection.value

    def disconnect(self, connection: int) -> None:
        """End a connection."""
        ctypes.CFUNCTYPE(None, U64, U64)(_table().disconnect)(self.handle, connection)

    def import_key(self, connection: int, region_id: int, key: bytes, nbytes: int) -> int:
        """Name a peer's region."""
        remote = U64()
        names = U64(connection), U64(region_id), _key(key), U64(nbytes), PTR(), SIZE(0)
        check("import_key", self.handle, *names, ctypes.pointer(remote))
        return remote.value

    def grant(self, registered: int, key: bytes, access: int) -> None:
        """Add a key with lesser rights."""
        blob, length = ctypes.create_string_buffer(BLOB_MAX), SIZE(BLOB_MAX)
        what = U64(registered), _key(key), U32(access), PTR(ctypes.addressof(blob))
        check("grant", self.handle, *what, ctypes.pointer(length))

    def revoke(self, registered: int, key: bytes | None, deadline: ctypes.c_uint64 | None = None) -> None:
        """Revoke a key, or all; without a deadline do not wait."""
        check("revoke", self.handle, U64(registered), _key(key) if key else PTR(), deadline or U64(0))

    def deregister(self, registered: int, seconds: float) -> None:
        """Take memory back."""
        check("deregister_memory", self.handle, U64(registered), deadline_ns(seconds))

    def submit(self, ops: Sequence[Op]) -> None:
        """Hand over operations, all of which must be taken."""
        array, accepted = (Op * len(ops))(*ops), SIZE()
        check("submit", self.handle, ctypes.pointer(array), SIZE(len(ops)), ctypes.pointer(accepted))
        assert accepted.value == len(ops)

    def poll(self) -> list[Completion]:
        """What has finished."""
        array, count = (Completion * 64)(), SIZE()
        check("poll", self.handle, ctypes.pointer(array), SIZE(64), ctypes.pointer(count))
        return list(array[: count.value])

    def finish(self, count: int, seconds: float = DEADLINE_S) -> list[Completion]:
        """Poll until so many completions have come."""
        finished: list[Completion] = []
        limit = time.monotonic() + seconds
        while len(finished) < count:
            assert time.monotonic() < limit, f"after {seconds} s {len(finished)} of {count} have completed"
            finished += self.poll()
        return finished

    def run(self, ops: Iterable[Op]) -> list[tuple[int, str]]:
        """Submit and finish; return status and reason of each, in the order of the operations."""
        ops = list(ops)
        for index, op in enumerate(ops):
            op.cookie = index + 1
        self.submit(ops)
        finished = sorted(self.finish(len(ops)), key=lambda item: int(item.cookie))
        return [(item.status, item.reason.decode()) for item in finished]
