"""A driver without hardware whose devices do what a test says: be slow, lose, fail, spoil, hang, die.

Its peers are engines of the same process. They find each other through a FakeFabric, which is the driver's
plugin for as long as it is entered::

    with FakeFabric() as fabric:
        left = TransferEngine(fabric.config("left", devices=2))
        right = TransferEngine(fabric.config("right"))
        fabric.device("left", 1).slow(bandwidth=1e6)
        fabric.device("left", 0).die()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from mooncake_transfer._errors import ConfigError
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.hooks import Available, DriverInfo, EndpointSpec, hookimpl
from mooncake_transfer.plugins import driver_plugins
from mooncake_transfer.testing import _fake

__all__ = ["FakeCounters", "FakeDevice", "FakeFabric", "FakeOperation", "FakeOptions"]

# By name, as in mc_memory_kind and mc_status of the driver ABI.
KINDS = {"dram": 0, "cuda": 1, "file": 2, "block": 3}
STATUSES = {
    "invalid": 2,
    "unsupported": 3,
    "no_memory": 4,
    "unreachable": 5,
    "refused": 6,
    "timeout": 8,
    "io": 9,
}
SAME_HOST_ONLY, STREAM = 1, 2
DEFAULT_PRIORITY = 50


class FakeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``driver_options`` of a fake driver may hold. Constant while an engine is open.

    Attributes:
        host: names the engine's devices; no two engines that are open at once share one.
        devices: how many endpoints the engine opens; they are ``fake0``, ``fake1`` and so on.
        numa_nodes: comma-separated, of each device in turn; empty: unknown.
        kinds: comma-separated memory kinds it takes. Bytes of ``file`` and ``block`` are read from and
            written to the descriptor, those of ``cuda`` are only counted, unless ``cuda_is_host``.
        cuda_is_host: addresses of kind ``cuda`` are ordinary memory.
        connect_ms: how long beginning a connection blocks its caller, as of a driver that looks something up.
        register_ms: how long registering memory takes its caller, as pinning does.
    has_event_fd: completions wake the engine; else it has to look for them.
        bandwidth: what it claims to move, in bytes a second.
        latency_ns: what it claims one small operation to take.
        alignment: of offsets and lengths.
        max_op_bytes: most bytes of an operation; 0: no limit.
        inline_bytes: batches up to this size are complete when submit returns; 0: none.
        in_flight_bytes: what it asks to be kept in flight on a connection; 0: the engine's default.
        in_flight_ops: how many operations it asks for; 0: the engine's default.
        queue_ops: it takes no more operations than this at once; 0: any number.
        same_host_only: it says that it reaches this host only.
        notice_bytes: its longest notice, at most 512; 0: it has none.
        notice_room: how many notices of peers wait to be fetched; beyond, senders wait.
    """

    host: str = "host"
    devices: int = 1
    numa_nodes: str = ""
    kinds: str = "dram"
    cuda_is_host: bool = False
    connect_ms: int = 0
    register_ms: int = 0
    has_event_fd: bool = True
    bandwidth: int = 1_000_000_000
    latency_ns: int = 10_000
    alignment: int = 1
    max_op_bytes: int = 0
    inline_bytes: int = 0
    in_flight_bytes: int = 0
    in_flight_ops: int = 0
    queue_ops: int = 0
    same_host_only: bool = False
    notice_bytes: int = 0
    notice_room: int = 256

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"devices is {self.devices}; a fake driver needs at least one")
        for kind in self.kinds.split(","):
            if kind not in KINDS:
                raise ConfigError(f"unknown memory kind {kind!r}; there are {', '.join(KINDS)}")


class FakeOperation(NamedTuple):
    """One operation as a device began to serve it.

    ``peer`` is the peer's device (``right.fake0``), ``region_id`` the number of its region, ``stream`` the
    device stream it was submitted on, or 0. Offsets and length are in bytes.
    """

    peer: str
    opcode: str
    region_id: int
    local_offset: int
    remote_offset: int
    length: int
    stream: int


class FakeCounters(msgspec.Struct, frozen=True, kw_only=True):
    """What a device has done since its fabric was made.

    Attributes:
        operations: taken; each ends as one of ``completed`` and ``errors``, or is still ``in_flight``.
        completed: that moved their bytes.
        errors: that ended otherwise, cancelled ones among them.
        bytes_read: moved from peers.
        bytes_written: moved to peers.
        submits: calls of submit, those on a stream among them.
        doorbells: runs of operations of one connection in a submit: what a NIC would be rung for.
        stream_submits: calls on a stream.
        cancels: calls of cancel.
        lost: operations that will not complete by themselves.
        corrupted: operations that spoilt a byte.
        refused: operations of peers on memory of this device.
        notices: delivered to peers.
        in_flight: operations now.
        in_flight_bytes: bytes of those.
        in_flight_max: most operations at any one time.
        in_flight_bytes_max: most bytes at any one time.
    """

    operations: int
    completed: int
    errors: int
    bytes_read: int
    bytes_written: int
    submits: int
    doorbells: int
    stream_submits: int
    cancels: int
    lost: int
    corrupted: int
    refused: int
    notices: int
    in_flight: int
    in_flight_bytes: int
    in_flight_max: int
    in_flight_bytes_max: int


class FakeDevice:
    """One device of a fake driver. What is set holds for operations that begin later; it outlives engines."""

    def __init__(self, fabric: _fake.Fabric, name: str) -> None:
        self._fabric = fabric
        self.name = name

    def _set(self, **values: float | None) -> None:
        for field, value in values.items():
            if value is not None:
                self._fabric.set(self.name, field, value)

    def slow(
        self, *, latency_s: float | None = None, jitter_s: float | None = None, bandwidth: float | None = None
    ) -> None:
        """Make operations take time; None leaves a value as it is.

        They are served one after another at ``bandwidth`` bytes a second (0: at once), that of the slower of
        the two devices; then ``latency_s`` of both passes and up to ``jitter_s`` more, so that they overtake.
        """
        self._set(latency_s=latency_s, jitter_s=jitter_s, bandwidth=bandwidth)

    def lose(self, *, next: int | None = None, rate: float | None = None) -> None:
        """Let operations of this side never complete: the ``next`` ones, and a share of all."""
        self._set(lose_next=next, loss=rate)

    def fail(self, *, next: int | None = None, rate: float | None = None, status: str = "io") -> None:
        """End operations of this side with an error: the ``next`` ones, and a share of all.

        ``status``: one of invalid, unsupported, no_memory, unreachable, refused, timeout, io.
        """
        self._set(error_status=STATUSES[status])
        self._set(fail_next=next, error_rate=rate)

    def corrupt(self, *, next: int | None = None, rate: float | None = None) -> None:
        """Flip a bit in what operations of this side move: in the ``next`` ones, and in a share of all."""
        self._set(corrupt_next=next, corrupt_rate=rate)

    def spoil_notices(
        self, *, delay_s: float | None = None, lose: int = 0, fail: int = 0, doubtful: int = 0
    ) -> None:
        """Let notices of this side come later than operations, by ``delay_s``, and the next ones go wrong.

        ``lose`` of them are delivered and never complete, ``fail`` end with an error and are not delivered,
        ``doubtful`` end with an error and are.
        """
        self._set(notice_delay_s=delay_s, lose_notices=lose, fail_notices=fail, doubtful_notices=doubtful)

    def inject_notice(self, data: bytes) -> None:
        """Have a notice come to this side that no peer has sent."""
        self._fabric.inject_notice(self.name, data)

    def reorder(self, on: bool = True) -> None:
        """Serve waiting operations in no order, and give out notices of peers in none."""
        self._set(reorder=on)

    def die(self) -> None:
        """End what is in flight from and to it as unreachable, and what comes later."""
        self._fabric.set_alive(self.name, False)

    def revive(self) -> None:
        """Undo ``die()``."""
        self._fabric.set_alive(self.name, True)

    def freeze(self) -> None:
        """Go on taking operations, but finish none from or to it."""
        self._fabric.set_frozen(self.name, True)

    def thaw(self) -> None:
        """Undo ``freeze()``; what was held back completes."""
        self._fabric.set_frozen(self.name, False)

    def hold(self) -> None:
        """Keep operations of peers in its memory once they are let in: nothing but ``release()`` ends them.

        Giving back that memory waits for them, as does closing either engine.
        """
        self._fabric.set_holding(self.name, True)

    def release(self) -> None:
        """Undo ``hold()``; what was held moves its bytes and completes."""
        self._fabric.set_holding(self.name, False)

    def held(self) -> int:
        """How many operations of peers it holds in its memory now."""
        return self._fabric.held_in(self.name)

    def cut(self, other: FakeDevice) -> None:
        """Take down the link to another device: as ``die()``, for what runs between the two."""
        self._fabric.set_link(self.name, other.name, False)

    def restore(self, other: FakeDevice) -> None:
        """Undo ``cut()``."""
        self._fabric.set_link(self.name, other.name, True)

    def record(self, on: bool = True) -> None:
        """Keep what is served from now on, the last 65,536 operations, for ``served()``."""
        self._set(record=on)

    def served(self) -> list[FakeOperation]:
        """Operations in the order in which this device began to serve them, while ``record()`` was on."""
        return [FakeOperation(*one) for one in self._fabric.served(self.name)]

    def counters(self) -> FakeCounters:
        """What it has done, now."""
        return FakeCounters(**self._fabric.counters(self.name))


class FakeFabric:
    """Devices, links and a clock; entered, it is the plugin of its drivers in this process.

    Chance is drawn from ``seed``. With ``manual_clock`` nothing moves but in ``advance()``, and all of it
    happens on the thread that calls it; otherwise the fabric has one thread. Thread-safe.

    ``drivers``: priority by name of each driver to offer; several show how an engine falls back.
    """

    def __init__(
        self, *, drivers: Mapping[str, int] | None = None, seed: int = 0, manual_clock: bool = False
    ) -> None:
        self._drivers = dict(drivers or {"fake": DEFAULT_PRIORITY})
        self._fabric = _fake.Fabric(seed, manual_clock)
        self._plugin_name = f"fake fabric {self._fabric.number}"

    def __enter__(self) -> FakeFabric:
        driver_plugins().manager.register(self, name=self._plugin_name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        driver_plugins().manager.unregister(name=self._plugin_name)
        self._fabric.close()

    def config(self, host: str, *, devices: int = 1, options: Any = None, **settings: Any) -> TransferConfig:
        """Return settings of an engine that has the devices of ``host`` and no other driver.

        ``options``: other fields of FakeOptions; ``settings``: other fields of TransferConfig.
        """
        chosen = {"host": host, "devices": devices, **(options or {})}
        names = tuple(self._drivers)
        return TransferConfig(drivers=names, driver_options=dict.fromkeys(names, chosen), **settings)

    def device(self, host: str, index: int = 0, *, driver: str | None = None) -> FakeDevice:
        """Return a device of a host, which need not be open yet. ``driver``: the first one when None."""
        return FakeDevice(self._fabric, f"{host}.{driver or next(iter(self._drivers))}{index}")

    @property
    def now_s(self) -> float:
        """The fabric's time: from 0 with a manual clock, else that of ``time.monotonic()``."""
        return self._fabric.now_ns() / 1e9

    def advance(self, seconds: float) -> None:
        """Move a manual clock on, doing what falls due in order. 0 does what is due already."""
        self._fabric.advance(round(seconds * 1e9))

    @hookimpl
    def mooncake_transfer_drivers(self) -> list[DriverInfo]:
        """Offer the fabric's drivers."""
        return [self._describe(name, priority) for name, priority in self._drivers.items()]

    def _describe(self, name: str, priority: int) -> DriverInfo:
        def endpoints(options: Mapping[str, object]) -> Sequence[EndpointSpec]:
            return self._endpoints(name, options)

        return DriverInfo(
            name,
            frozenset(KINDS),
            priority=priority,
            probe=lambda: Available((f"fabric {self._fabric.number}",)),
            load=lambda: _fake.driver(name),
            options=lambda options: endpoints(options)[0].options,
            endpoints=endpoints,
        )

    def _endpoints(self, driver: str, given: Mapping[str, object]) -> list[EndpointSpec]:
        try:
            options = msgspec.convert(dict(given), FakeOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"options of driver {driver!r}: {error}") from None
        nodes = [int(node) for node in options.numa_nodes.split(",") if node]
        nodes += [-1] * (options.devices - len(nodes))
        return [
            EndpointSpec(f"{driver}{index}", self._rendered(f"{options.host}.{driver}{index}", options), node)
            for index, node in zip(range(options.devices), nodes, strict=False)
        ]

    def _rendered(self, device: str, options: FakeOptions) -> dict[str, str]:
        kinds = sum(1 << KINDS[kind] for kind in set(options.kinds.split(",")))
        numbers = {
            "fabric": self._fabric.number,
            "memory_kinds": kinds,
            "flags": STREAM | (SAME_HOST_ONLY if options.same_host_only else 0),
            "bandwidth_bytes_per_s": options.bandwidth,
            "latency_ns": options.latency_ns,
            "max_op_bytes": options.max_op_bytes,
            "alignment": options.alignment,
            "inline_bytes": options.inline_bytes,
            "in_flight_bytes": options.in_flight_bytes,
            "in_flight_ops": options.in_flight_ops,
            "queue_ops": options.queue_ops,
            "cuda_is_host": int(options.cuda_is_host),
            "connect_ms": options.connect_ms,
            "register_ms": options.register_ms,
            "has_event_fd": int(options.has_event_fd),
            "notice_bytes": options.notice_bytes,
            "notice_room": options.notice_room,
        }
        return {"device": device, **{name: str(number) for name, number in numbers.items()}}
