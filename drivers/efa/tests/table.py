"""The driver's C function table, called from Python: what the engine sees, without the engine."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from types import TracebackType

from mooncake_driver_efa import plugin

__all__ = ["OK", "READ", "REFUSED", "WRITE", "Endpoint", "op"]

OK, REFUSED = 0, 6
READ, WRITE = 0, 1
BLOB_MAX = 1024
DEADLINE_S = 30.0
U32, U64, I32, SIZE, PTR = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p


class Memory(ctypes.Structure):
    """mc_memory, as ABI 1.1 has it."""

    _fields_ = [
        *(("struct_size", U32), ("kind", U32), ("device", I32), ("fd", I32), ("fd_offset", U64)),
        *(("address", U64), ("length", U64), ("region_id", U64), ("key", ctypes.c_uint8 * 16)),
        *(("numa_node", I32), ("reserved", U32)),
    ]


class Op(ctypes.Structure):
    """mc_op."""

    _fields_ = [
        *(("opcode", U32), ("flags", U32), ("connection", U64), ("local", U64), ("remote", U64)),
        *(("local_offset", U64), ("remote_offset", U64), ("length", U64), ("cookie", U64)),
    ]


class Completion(ctypes.Structure):
    """mc_completion."""

    _fields_ = [("cookie", U64), ("bytes", U64), ("status", I32), ("reason", ctypes.c_char * 200)]


class Notice(ctypes.Structure):
    """mc_notice."""

    _fields_ = [("length", U32), ("reserved", U32), ("data", ctypes.c_uint8 * 512)]


class Option(ctypes.Structure):
    """mc_option."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_char_p)]


FUNCTIONS = [
    *("open", "close", "caps", "stats", "last_error", "export_address", "connect", "disconnect"),
    *("register_memory", "deregister_memory", "export_key", "import_key", "release_key", "submit", "poll"),
    *("event_fd", "arm", "cancel", "grant", "revoke", "submit_on_stream", "late_writes", "fence"),
    *("notify", "poll_notices"),
]


class Table(ctypes.Structure):
    """mc_driver_v1."""

    _fields_ = [("abi_major", U32), ("abi_minor", U32), ("struct_size", SIZE), ("name", ctypes.c_char_p)] + [
        (name, PTR) for name in FUNCTIONS
    ]


def _call(name: str, *arguments: object) -> int:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = PTR, [ctypes.py_object, ctypes.c_char_p]
    table = Table.from_address(pointer(plugin.load(), b"mooncake.driver.v1"))
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(type(argument) for argument in arguments))
    code = int(kind(getattr(table, name))(*arguments))
    if code != OK and name not in ("submit", "notify"):
        reason = ctypes.CFUNCTYPE(ctypes.c_char_p)(table.last_error)()
        raise AssertionError(f"{name}: {code}: {reason.decode()}")
    return code


def op(opcode: int, connection: int, local: int, remote: int, at: tuple[int, int, int], cookie: int) -> Op:
    """An operation; ``at``: local offset, remote offset, length."""
    local_offset, remote_offset, length = at
    return Op(opcode, 0, connection, local, remote, local_offset, remote_offset, length, cookie)


class Endpoint:
    """One endpoint of the driver. A context manager."""

    def __init__(self, **options: object) -> None:
        pairs = ((name.encode(), str(value).encode()) for name, value in options.items())
        given = (Option * len(options))(*pairs)
        self.handle = U64()
        _call("open", PTR(ctypes.addressof(given)), SIZE(len(options)), ctypes.pointer(self.handle))
        self._kept: list[object] = []

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _call("close", self.handle)

    def register(self, memory: bytearray, region: int, key: bytes) -> int:
        """Register memory; return its handle."""
        hold = (ctypes.c_char * len(memory)).from_buffer(memory)
        self._kept.append(hold)
        what = Memory(
            struct_size=ctypes.sizeof(Memory), fd=-1, address=ctypes.addressof(hold), length=len(memory)
        )
        what.region_id, what.key, what.numa_node = region, (ctypes.c_uint8 * 16)(*key), -1
        registered = U64()
        _call("register_memory", self.handle, ctypes.pointer(what), ctypes.pointer(registered))
        return registered.value

    def connect(self, other: Endpoint) -> int:
        """Begin a connection to another endpoint."""
        blob, length, connection = ctypes.create_string_buffer(BLOB_MAX), SIZE(BLOB_MAX), U64()
        _call("export_address", other.handle, PTR(ctypes.addressof(blob)), ctypes.pointer(length))
        _call("connect", self.handle, PTR(ctypes.addressof(blob)), length, ctypes.pointer(connection))
        return connection.value

    def import_key(self, connection: int, region: int, key: bytes, nbytes: int) -> int:
        """Name a peer's region."""
        remote = U64()
        names = U64(connection), U64(region), ctypes.cast(ctypes.c_char_p(key), PTR), U64(nbytes)
        _call("import_key", self.handle, *names, PTR(), SIZE(0), ctypes.pointer(remote))
        return remote.value

    def submit(self, ops: Sequence[Op]) -> None:
        """Hand over operations, all of which must be taken."""
        array, accepted = (Op * len(ops))(*ops), SIZE()
        assert (
            _call("submit", self.handle, ctypes.pointer(array), SIZE(len(ops)), ctypes.pointer(accepted))
            == OK
        )
        assert accepted.value == len(ops)

    def notify(self, connection: int, data: bytes, cookie: int) -> None:
        """Send a notice."""
        pointer = ctypes.cast(ctypes.c_char_p(data), PTR)
        assert _call("notify", self.handle, U64(connection), pointer, SIZE(len(data)), U64(cookie)) == OK

    def poll(self) -> list[tuple[int, int]]:
        """Cookie and status of what has finished."""
        array, count = (Completion * 64)(), SIZE()
        _call("poll", self.handle, ctypes.pointer(array), SIZE(64), ctypes.pointer(count))
        return [(item.cookie, item.status) for item in array[: count.value]]

    def poll_notices(self) -> list[bytes]:
        """Notices that have come."""
        array, count = (Notice * 16)(), SIZE()
        _call("poll_notices", self.handle, ctypes.pointer(array), SIZE(16), ctypes.pointer(count))
        return [bytes(item.data[: item.length]) for item in array[: count.value]]

    def finish(self, count: int, seconds: float = DEADLINE_S) -> dict[int, int]:
        """Poll until so many operations have completed; their status by cookie."""
        finished: dict[int, int] = {}
        limit = time.monotonic() + seconds
        while len(finished) < count:
            assert time.monotonic() < limit, f"after {seconds} s {len(finished)} of {count} have completed"
            finished.update(self.poll())
        return finished
