"""Every public callable refuses an argument of the wrong type by its name, with an error of this package."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import inspect
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import mooncake_transfer
from mooncake_transfer import (
    FileSource,
    Grid,
    GridSide,
    MemoryRange,
    Peer,
    RailConfig,
    Region,
    RemoteRegion,
    Transfer,
    TransferConfig,
    TransferEngine,
)
from mooncake_transfer.errors import ConfigError, TransferError
from mooncake_transfer.memory import DeviceSource
from mooncake_transfer.pool import BufferPool, PooledBuffer
from mooncake_transfer.shared import SharedSegment
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.tls import TlsConfig
from mooncake_transfer.transfer import TransferFuture

ROWS = [[0, 0, 8]]
SIDE = GridSide(index=[0], stride=8)
PEM = {"ca_file": "a", "certificate_file": "b", "key_file": "c"}
SUBJECTS: tuple[type, ...] = (
    BufferPool,
    DeviceSource,
    FileSource,
    Grid,
    GridSide,
    MemoryRange,
    Peer,
    PooledBuffer,
    RailConfig,
    Region,
    RemoteRegion,
    SharedSegment,
    TlsConfig,
    Transfer,
    TransferConfig,
    TransferEngine,
    TransferFuture,
)
# The engine makes these and hands them out; nobody calls their constructors.
RECORDS = {"Caller", "DriverStatus", "MemoryKind", "RailStatus", "TransferState", "TransferStatus"}
MADE_BY_THE_ENGINE = {Peer, Region, RemoteRegion, PooledBuffer, SharedSegment, TransferFuture}
# What takes any object: for each, an object that is of no use there is refused like one of a wrong type.
HARMLESS = {
    "MemoryRange.owner",  # is kept alive, whatever it is
    "TransferFuture.set_exception",
    "TransferFuture.set_result",
    "TransferFuture.add_done_callback",
    "Grid.arguments",
}
GIVEN: dict[str, dict[str, Any]] = {  # what a call needs beside the argument that is wrong
    "BufferPool": {"engine": "engine"},
    "BufferPool.acquire": {"nbytes": 8},
    "DeviceSource": {"location": "nvme://x", "nbytes": 8},
    "FileSource": {"file": "x"},
    "Grid": {"local": SIDE, "remote": SIDE, "length": 8},
    "GridSide": {"index": [0], "stride": 8},
    "MemoryRange": {"address": 4096, "nbytes": 8},
    "Peer.call": {"method": "m"},
    "Peer.notify": {"method": "m"},
    "Peer.region": {"name": "kv", "key": bytes(16)},
    "Region.revoke": {"descriptor": "granted"},
    "Region.ways": {"descriptor": "granted"},
    "SharedSegment.part": {"rank": 0, "world_size": 1},
    "TlsConfig": PEM,
    "Transfer": {"engine": "engine", "write": True, "local": "local", "remote": "remote", "blocks": ROWS},
    "TransferEngine.allocate": {"nbytes": 8},
    "TransferEngine.connect": {"address": "address"},
    "TransferEngine.disable_driver": {"name": "fake"},
    "TransferEngine.enable_driver": {"name": "fake"},
    "TransferEngine.find_region": {"path": "a/b"},
    "TransferEngine.import_region": {"descriptor": "descriptor"},
    "TransferEngine.on_peer_lost": {"handler": print},
    "TransferEngine.publish": {"region": "local"},
    "TransferEngine.read": {"local": "local", "remote": "remote", "blocks": ROWS},
    "TransferEngine.register": {"memory": bytearray(8)},
    "TransferEngine.register_many": {"memories": []},
    "TransferEngine.serve": {"method": "m", "handler": print},
    "TransferEngine.serve_compiled": {"method": "m", "handler": print},
    "TransferEngine.withdraw": {"region": "local"},
}
for same in ("write", "prepare_read", "prepare_write"):
    GIVEN[f"TransferEngine.{same}"] = GIVEN["TransferEngine.read"]


class Alien:
    """Of a type that nothing takes."""


class Stream:
    """A stream of a device, with a handle that none can have."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


BAD = "\udc80"
SHOWN_BAD = r"'\\udc80'; it must be text that UTF-8 can encode"
HUGE = bytes((64 << 20) + 1)
U32 = (1 << 32) - 1


class World:
    """One object of each public class, to call its methods on."""

    def __init__(self, stack: ExitStack) -> None:
        fabric = stack.enter_context(FakeFabric())
        engine = stack.enter_context(TransferEngine(fabric.config("near")))
        far = stack.enter_context(TransferEngine(fabric.config("far")))
        local, owned = engine.allocate(4096), far.allocate(4096)
        remote = engine.import_region(owned.descriptor())
        pool = stack.enter_context(BufferPool(engine, slab_bytes=4096, max_bytes=4096))
        transfer = engine.prepare_write(local, remote, ROWS)
        running = engine.write(local, remote, ROWS)
        self.named: dict[str, object] = {
            "engine": engine,
            "local": local,
            "remote": remote,
            "descriptor": owned.descriptor(),
            "granted": local.grant("r"),
            "address": far.address,
        }
        subjects = (
            pool,
            stack.enter_context(pool.acquire(8)),
            remote.peer,
            local,
            remote,
            transfer,
            engine,
            running.future(),
            stack.enter_context(SharedSegment.offer(engine.allocate(4096), f"test-{uuid.uuid4()}")),
        )
        self.subjects = {type(subject): subject for subject in subjects}

    def given(self, call: str) -> dict[str, Any]:
        known = GIVEN.get(call, {})
        return {k: self.named.get(v, v) if isinstance(v, str) else v for k, v in known.items()}


def public_calls() -> Iterator[tuple[str, type, str]]:
    """Name each constructor and method: its label, the class, the method ('' for the constructor)."""
    for kind in SUBJECTS:
        if kind not in MADE_BY_THE_ENGINE:
            yield kind.__name__, kind, ""
        for name, _ in inspect.getmembers(kind, callable):
            if not name.startswith("_") and not isinstance(inspect.getattr_static(kind, name), classmethod):
                yield f"{kind.__name__}.{name}", kind, name


def parameters(kind: type, method: str) -> list[str]:
    if not method and (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        return [*inspect.signature(kind).parameters]
    function = getattr(kind, method) if method else kind.__init__
    if function is TransferEngine.read or function is TransferEngine.write:
        return ["local", "remote", "blocks", *inspect.signature(Transfer.post).parameters][:-1]
    try:
        names = [*inspect.signature(function).parameters]
    except ValueError:  # a compiled one; what Transfer adds to it calls it with checked arguments
        names = {"wait": ["self", "timeout_s"]}.get(method, ["self"])
    return names[1:]


CASES = sorted({
    f"{label}({parameter})"
    for label, kind, method in public_calls()
    for parameter in parameters(kind, method)
    if parameter != "self" and not {label, f"{label}.{parameter}"} & HARMLESS
})  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def call(world: World, label: str, parameter: str, value: object) -> None:
    kind = {kind.__name__: kind for kind in SUBJECTS}[label.partition(".")[0]]
    method = label.partition(".")[2]
    function: Callable[..., object] = getattr(world.subjects[kind], method) if method else kind
    arguments = {**world.given(label), parameter: value}
    made = function(**arguments)
    if inspect.iscoroutine(made):
        asyncio.run(made)


@pytest.mark.parametrize("case", CASES)
def test_an_argument_of_the_wrong_type_is_refused_by_its_name(world: World, case: str) -> None:
    label, _, parameter = case.rstrip(")").partition("(")
    for value in (Alien(), {"a": Alien()}):  # the latter: what has a length and can be iterated
        with pytest.raises(TransferError) as caught:
            call(world, label, parameter, value)
        assert re.search(rf"\b{parameter}\b", str(caught.value)), (value, caught.value)


@pytest.mark.parametrize(
    ("label", "arguments", "expected"),
    [
        ("TransferConfig", {"drivers": "tcp"}, r"drivers is 'tcp'; it must be of type tuple\[str"),
        ("TransferConfig", {"tls": "x"}, "tls is 'x'; it must be of type TlsConfig"),
        ("TransferConfig", {"registry": 5}, "registry is 5; it must be of type str"),
        ("TransferConfig", {"driver_options": {"tcp": 5}}, r"driver_options is \{'tcp': 5\}; it must be"),
        ("TransferConfig", {"port": "x"}, "port is 'x'; it must be of type int"),
        ("TransferConfig", {"port_range": 5}, "port_range is 5"),
        ("RailConfig", {"attempts": 1.5}, r"rails\.attempts is 1\.5; it must be of type int"),
        ("TlsConfig", {"data": "yes"}, r"tls\.data is 'yes'; it must be of type bool"),
        ("TransferEngine.connect", {"address": 5}, "address is 5; it must be text"),
        ("TransferEngine.serve", {"method": "x", "handler": 5}, "handler is 5; it must be a function"),
        ("TransferEngine.serve", {"handler": print, "method": 5}, "method is 5; it must be text"),
        ("TransferEngine.read", {"priority": 3}, "priority is 3; it must be 'high', 'normal' or 'low'"),
        ("TransferEngine.write", {"verify": "no"}, "verify is 'no'; it must be True or False"),
        ("TransferEngine.write", {"drivers": "tcp"}, "drivers is 'tcp'; it must be a list or tuple"),
        ("TransferEngine.write", {"attempts": 0}, "attempts is 0; it must be 1 or more"),
        ("TransferEngine.write", {"blocks": [[1, 2, 3], [4]]}, "blocks is no array of integers"),
        ("TransferEngine.import_region", {"descriptor": "text"}, "descriptor is 'text'; it must be bytes"),
        ("TransferEngine.allocate", {"nbytes": "1M"}, "nbytes is '1M'; it must be an integer"),
        ("TransferEngine.allocate", {"nbytes": True}, "nbytes is True; it must be an integer"),
        ("GridSide", {"index": "x"}, "index must be a row of integers"),
        ("Peer.call", {"method": "m", "payload": "text"}, "payload is 'text'; it must be bytes"),
        # What no core has room for, and text that none can be told.
        ("TransferEngine.write", {"attempts": 1 << 40}, f"attempts is {1 << 40}; it must be at most {U32}"),
        ("TransferEngine.write", {"stream": 1 << 70}, f"stream is {1 << 70}; it must be at most"),
        ("TransferEngine.write", {"stream": Stream(1 << 70)}, f"stream is {1 << 70}; it must be at most"),
        (
            "TransferEngine.write",
            {"deadline_s": 10**400},
            r"deadline_s is 10+\.\.\.; it must be a number of sec",
        ),
        ("TransferEngine.write", {"deadline_s": 10**5000}, r"deadline_s is beyond what can be shown"),
        ("TransferEngine.write", {"drivers": [BAD]}, rf"a name of drivers is {SHOWN_BAD}"),
        ("TransferEngine.write", {"notify": (BAD, b"")}, rf"the method of notify is {SHOWN_BAD}"),
        (
            "TransferEngine.write",
            {"notify": ("m" * 70000, b"")},
            r"the method of notify is 'm.* at most 65535",
        ),
        (
            "TransferEngine.write",
            {"notify": ("m", HUGE)},
            "the payload of notify has 67108865 bytes, more than",
        ),
        ("RailConfig", {"attempts": 1 << 40}, rf"rails\.attempts is {1 << 40}; it must be at most {U32}"),
        ("RailConfig", {"probe_every": 1 << 40}, r"rails\.probe_every is .* at most"),
        ("RailConfig", {"breaker_errors": 1 << 33}, r"rails\.breaker_errors is .* at most"),
        ("RailConfig", {"slice_bytes": 1 << 65}, r"rails\.slice_bytes is "),
        ("TransferConfig", {"host": BAD}, f"host is {SHOWN_BAD}"),
        ("TransferConfig", {"host": "a\0b"}, "host is 'a.*b'; it must be text without the character NUL"),
        ("TransferConfig", {"drivers": (BAD,)}, f"drivers is {SHOWN_BAD}"),
        ("TransferConfig", {"driver_options": {"tcp": {"hosts": BAD}}}, "driver_options.* is " + SHOWN_BAD),
        ("TransferEngine.allocate", {"name": BAD}, f"name is {SHOWN_BAD}"),
        ("TransferEngine.allocate", {"name": "a\0b"}, "name is 'a.*b'; it must be text without"),
        ("TransferEngine.connect", {"address": BAD + ":1"}, "address is .*UTF-8"),
        ("TransferEngine.connect", {"address": "a:" + "9" * 5000}, "address 'a:9.* is not host:port"),
        ("TransferEngine.serve", {"handler": print, "method": BAD}, f"method is {SHOWN_BAD}"),
        ("TransferEngine.serve", {"handler": print, "method": "m" * 70000}, "method is 'm.* at most 65535"),
        ("Peer.call", {"method": BAD}, f"method is {SHOWN_BAD}"),
        ("Peer.call", {"method": "m" * 70000}, "method is 'm.* at most 65535 bytes long; it has 70000"),
        ("Peer.notify", {"method": "\u20ac" * 30000}, "method is .* at most 65535 bytes long; it has 90000"),
        ("Peer.region", {"key": bytes(16), "name": BAD}, f"name is {SHOWN_BAD}"),
        ("FileSource", {"file": "a\0b"}, "file is 'a.*b'; it must be a path without the character NUL"),
        ("FileSource", {"file": 1 << 40}, f"file is {1 << 40}; it must be at most"),
        ("FileSource", {"file": -1}, "file is -1; it must be 0 or more"),
        ("MemoryRange", {"device": 1 << 40}, f"device is {1 << 40}; it must be at most"),
        ("MemoryRange", {"device": -2}, "device is -2; it must be -1 or more"),
        ("DeviceSource", {"nbytes": 1 << 64}, f"nbytes is {1 << 64}; it must be at most"),
        ("DeviceSource", {"offset": 1 << 64}, f"offset is {1 << 64}; it must be at most"),
        (
            "TransferEngine.register",
            {"memory": np.array([object()])},
            "cannot register ndarray .* references",
        ),
    ],
    ids=lambda given: ",".join(given) if isinstance(given, dict) else "",
)
def test_what_is_easily_mistaken_is_told_with_what_it_must_be(
    world: World, label: str, arguments: dict[str, Any], expected: str
) -> None:
    *others, (parameter, value) = arguments.items()
    assert all(name in world.given(label) for name, _ in others)
    with pytest.raises(TransferError, match=f"^{expected}"):
        call(world, label, parameter, value)


@pytest.mark.parametrize("given", [None, bytes(8), [1, 2], "kv"], ids=repr)
@pytest.mark.parametrize("side", ["local", "remote"])
def test_what_is_no_region_is_refused(world: World, side: str, given: Any) -> None:
    with pytest.raises(TransferError, match=rf"^{side} is .*it must be a (Remote)?Region"):
        call(world, "TransferEngine.read", side, given)


def test_regions_in_the_wrong_order_are_refused(world: World) -> None:
    engine, local, remote = (world.named[name] for name in ("engine", "local", "remote"))
    assert isinstance(engine, TransferEngine)
    with pytest.raises(TransferError, match=r"^local is .*RemoteRegion\); it must be a Region"):
        engine.write(remote, local, ROWS)  # type: ignore[arg-type]


def test_a_name_that_cannot_be_told_is_refused_for_a_segment(world: World) -> None:
    region = world.named["local"]
    assert isinstance(region, Region)
    with pytest.raises(ConfigError, match=f"^name is {SHOWN_BAD}"):
        SharedSegment.offer(region, BAD)


def test_a_tensor_without_memory_in_one_piece_is_refused(world: World) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    engine = world.named["engine"]
    assert isinstance(engine, TransferEngine)
    with pytest.raises(ConfigError, match=r"cannot register a tensor of layout torch\.sparse_coo"):
        engine.register(torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match="cannot register a tensor of layout"):
        engine.register(torch.nn.parameter.UninitializedParameter())


def test_what_holds_references_is_refused_in_any_view_and_numbers_are_taken(world: World) -> None:
    engine = world.named["engine"]
    assert isinstance(engine, TransferEngine)
    rows = np.zeros(4, dtype=[("O", "u8"), ("what", object)])
    for given in (rows, memoryview(rows), memoryview(np.array([object()])), (ctypes.py_object * 2)()):
        with pytest.raises(ConfigError, match="references to Python objects"):
            engine.register(given)
    for taken in (np.zeros(4, dtype=[("O", "u8")]), (ctypes.c_uint64 * 2)(), bytearray(4)):
        engine.register(taken).close()


def test_what_means_the_same_is_taken() -> None:
    given: dict[str, Any] = {
        "drivers": ["tcp"],
        "topology": Path("topology.toml"),
        "port_range": [7000, 7010],
    }
    config = TransferConfig(**given)
    assert config.topology == "topology.toml"
    assert (config.drivers, config.port_range) == (("tcp",), (7000, 7010))
    assert RailConfig(aging_s=1).aging_s == 1.0


def test_every_public_class_is_tried() -> None:
    tried = {kind.__name__ for kind in SUBJECTS}
    assert set(mooncake_transfer.__all__) <= tried | RECORDS
