"""A driver in plain Python passes the suite of all drivers, and its faults stay its own."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, plugins
from mooncake_transfer.errors import DriverUnavailable, TransferError
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, hookimpl
from mooncake_transfer.python_driver import (
    DriverFailure,
    EndpointCaps,
    EndpointMemory,
    Opcode,
    Operation,
    PythonEndpoint,
    StatusCode,
    capsule,
)
from mooncake_transfer.testing import DriverConformance, Quirks

PIECE = 256 << 10
TURN_S = 0.002
DEADLINE_S = 20.0


class Region:
    """Memory of one endpoint, and its keys: access rights by key."""

    def __init__(self, memory: EndpointMemory, key: bytes) -> None:
        self.memory = memory
        self.keys = {key: 3}
        self.lock = threading.Lock()  # held by who copies

    def access(self, key: bytes) -> int:
        return next((rights for known, rights in self.keys.items() if hmac.compare_digest(known, key)), 0)


class Memory(PythonEndpoint):
    """Copies between endpoints of one process."""

    caps = EndpointCaps(same_host_only=True)
    everybody: ClassVar[dict[bytes, Memory]] = {}
    _numbers = itertools.count(1)

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self.name = b"memory %d" % next(self._numbers)
        self.regions: dict[int, Region] = {}
        self.by_id: dict[int, Region] = {}
        self.connections: dict[int, bytes] = {}
        self.remotes: dict[int, tuple[int, int, bytes]] = {}
        self.queue: deque[tuple[Operation, int]] = deque()

    def address(self) -> bytes:
        self.everybody[self.name] = self
        return self.name

    def connect(self, connection: int, address: bytes) -> None:
        self.connections[connection] = address

    def disconnect(self, connection: int) -> None:
        del self.connections[connection]
        self.end(lambda operation: operation.connection == connection, StatusCode.CLOSED)

    def register(self, registered: int, memory: EndpointMemory, key: bytes) -> bytes:
        self.regions[registered] = self.by_id[memory.region_id] = Region(memory, key)
        return b""

    def deregister(self, registered: int) -> bool:
        region = self.regions.pop(registered)
        with region.lock:
            region.keys.clear()
        del self.by_id[region.memory.region_id]
        return True

    def grant(self, registered: int, key: bytes, access: int) -> bytes:
        self.regions[registered].keys[key] = access
        return b""

    def revoke(self, registered: int, key: bytes | None) -> bool:
        region = self.regions[registered]
        if key is not None and key not in region.keys:
            raise DriverFailure(StatusCode.INVALID, "the region never had this key")
        with region.lock:
            for known in [key] if key is not None else list(region.keys):
                region.keys[known] = 0
        return True

    def import_key(
        self, remote: int, connection: int, region_id: int, key: bytes, length: int, blob: bytes
    ) -> None:
        self.remotes[remote] = (connection, region_id, key)

    def release_key(self, remote: int) -> None:
        self.remotes.pop(remote, None)

    def submit(self, operations: Sequence[Operation]) -> None:
        self.queue.extend((operation, 0) for operation in operations)

    def cancel(self, cookie: int) -> None:
        self.end(lambda operation: operation.cookie == cookie, StatusCode.CANCELLED)

    def end(self, meant: object, code: StatusCode) -> None:
        waiting, self.queue = self.queue, deque()
        for operation, moved in waiting:
            if meant(operation):  # type: ignore[operator]
                self.finish(operation, code, "it was ended", moved=moved)
            else:
                self.queue.append((operation, moved))

    def progress(self) -> float:
        limit = time.monotonic() + TURN_S
        while self.queue and time.monotonic() < limit:
            operation, moved = self.queue.popleft()
            try:
                length = self.copy(operation, moved)
            except DriverFailure as failure:
                self.finish(operation, failure.code, str(failure), moved=moved)
                continue
            if moved + length < operation.length:
                self.queue.appendleft((operation, moved + length))
            else:
                self.finish(operation)
        return 0.0 if self.queue else 0.5

    def copy(self, operation: Operation, moved: int) -> int:
        if operation.connection not in self.connections or operation.remote not in self.remotes:
            raise DriverFailure(StatusCode.INVALID, "no such connection or remote memory")
        peer = self.everybody.get(self.connections[operation.connection])
        if peer is None:
            raise DriverFailure(StatusCode.UNREACHABLE, "the peer has gone")
        _, region_id, key = self.remotes[operation.remote]
        region = peer.by_id.get(region_id)
        if region is None:
            raise DriverFailure(StatusCode.REFUSED, "no such region")
        at, size = operation.remote_offset + moved, min(PIECE, operation.length - moved)
        with region.lock:
            inside = operation.remote_offset + operation.length <= region.memory.length
            if not inside or not region.access(key) & (1 << operation.opcode):
                peer.count_refusal()
                raise DriverFailure(StatusCode.REFUSED, "wrong key or range")
            there = region.memory.address + at
            here = self.regions[operation.local].memory.address + operation.local_offset + moved
            ends = (here, there) if operation.opcode == Opcode.READ else (there, here)
            ctypes.memmove(*ends, size)
        return size

    def close(self) -> None:
        self.everybody.pop(self.name, None)
        for region in self.by_id.values():
            with region.lock:
                region.keys.clear()


class Broken(Memory):
    """Fails in everything but opening."""

    def register(self, registered: int, memory: EndpointMemory, key: bytes) -> bytes:
        raise ZeroDivisionError("the driver has a fault")

    def progress(self) -> float:
        raise ZeroDivisionError("the driver has a fault")


class Unopenable(Memory):
    def address(self) -> bytes:
        raise DriverFailure(StatusCode.UNSUPPORTED, "no such device")


class Late(Memory):
    """Its first device loses writes on their way, which may land until the peer has fenced them."""

    fenced: ClassVar[list[bytes]] = []
    lost: ClassVar[list[Late]] = []

    def copy(self, operation: Operation, moved: int) -> int:
        if self.options["device"] == "first" and operation.opcode == Opcode.WRITE:
            self.lost.append(self)
            self.late_writes(operation.connection, b"lost by " + self.name)
            raise DriverFailure(StatusCode.UNREACHABLE, "the write was lost on its way")
        assert self.fenced or not self.lost, "an operation overtakes a write that may land yet"
        return super().copy(operation, moved)

    def fence(self, token: bytes) -> bool:
        self.fenced.append(token)
        if len(self.fenced) < 2:
            return False  # and is asked again
        for initiator in self.lost:
            for connection in initiator.connections:
                initiator.late_writes(connection, b"")
        return True


def two_devices(_: Mapping[str, object]) -> list[EndpointSpec]:
    """Of the driver above."""
    return [EndpointSpec(name, {"device": name}) for name in ("first", "second")]


class Plugin:
    @hookimpl
    def mooncake_transfer_drivers(self) -> list[DriverInfo]:
        return [
            DriverInfo(
                kind.__name__.lower(),
                frozenset({"dram"}),
                priority=1,
                probe=Available,
                load=lambda kind=kind: capsule(kind.__name__.lower(), kind, fences=kind is Late),
                trusted_probe=True,
                endpoints=two_devices if kind is Late else None,
            )
            for kind in (Memory, Broken, Unopenable, Late)
        ]


@pytest.fixture(scope="module", autouse=True)
def _plugin() -> Iterator[None]:
    found, plugin = plugins.driver_plugins(), Plugin()
    found.manager.register(plugin)
    yield
    found.manager.unregister(plugin)


class TestMemory(DriverConformance):
    driver = "memory"
    quirks = Quirks(ordered=True, same_host_only=True, same_process_only=True)


def test_what_a_driver_raises_reaches_the_caller_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with TransferEngine(TransferConfig(drivers=("broken",))) as engine:
        for _ in range(2):
            with pytest.raises(TransferError, match="ZeroDivisionError: the driver has a fault"):
                engine.allocate(4096)
    assert any("ZeroDivisionError" in (record.exc_text or "") for record in caplog.records)


def test_a_write_waits_until_the_peer_has_fenced_those_that_may_land_yet() -> None:
    with TransferEngine(TransferConfig(drivers=("late",))) as owner:
        there = owner.allocate(4096)
        with TransferEngine(TransferConfig(drivers=("late",))) as user:
            here, remote = user.allocate(4096), user.import_region(there.descriptor())
            for number in range(1, 200):  # sooner or later one goes by the device that loses them
                here.view()[:] = bytes([number]) * 4096
                user.write(here, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
                assert bytes(there.view()) == bytes(here.view())
                if Late.lost:
                    break
    assert len(Late.fenced) >= 2
    assert set(Late.fenced) == {b"lost by " + loser.name for loser in Late.lost}


def test_an_endpoint_that_cannot_be_opened_says_why() -> None:
    with pytest.raises(DriverUnavailable, match="no such device"):
        TransferEngine(TransferConfig(drivers=("unopenable",)))


def test_more_drivers_than_there_are_tables_are_refused() -> None:
    made = []
    with contextlib.suppress(DriverUnavailable):
        made += [capsule(f"extra{number}", Memory) for number in range(9)]
    assert not made
    with pytest.raises(DriverUnavailable, match="can have 8 drivers that are written in Python"):
        capsule("another", Memory)
