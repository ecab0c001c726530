"""Endpoints of engines: ports, options, restarts, forks."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from mooncake_driver_tcp import TcpOptions
from mooncake_driver_tcp.options import render
from mooncake_driver_tcp.testing import Address
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable, PeerUnreachable
from mooncake_transfer.testing import pattern

MIB = 1 << 20
DEADLINE_S = 10.0

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def check_read(reader: TransferEngine, owner: TransferEngine, nbytes: int) -> None:
    source, place = owner.allocate(nbytes), reader.allocate(nbytes)
    source.view()[:] = pattern(1, nbytes).tobytes()
    reader.read(place, reader.import_region(source.descriptor()), [[0, 0, nbytes]]).wait(DEADLINE_S)
    assert place.view() == source.view()


def test_a_taken_port_is_an_error_that_names_it(start: Start, taken_port: int) -> None:
    with pytest.raises(DriverUnavailable, match=f"{taken_port} on 127.0.0.1 is taken"):
        start(port_min=taken_port)


def test_the_first_free_port_of_a_range_is_taken(
    start: Start, address_of: AddressOf, taken_port: int
) -> None:
    most = min(taken_port + 20, 65535)
    assert taken_port < address_of(start(port_min=taken_port, port_max=most)).port <= most


def test_every_interface_is_told_to_peers_of_a_wildcard_endpoint(start: Start, address_of: AddressOf) -> None:
    owner = start(host="0.0.0.0")
    hosts = address_of(owner).hosts
    assert hosts[-1] == "127.0.0.1"
    assert "0.0.0.0" not in hosts
    check_read(start(), owner, MIB)


def test_peers_are_told_the_address_to_advertise(start: Start, address_of: AddressOf) -> None:
    owner = start(host="0.0.0.0", advertise_host="127.0.0.9")
    assert address_of(owner).hosts == ("127.0.0.9",)
    check_read(start(), owner, MIB)


def test_the_engine_gives_the_driver_its_host(engine: TransferEngine, address_of: AddressOf) -> None:
    assert address_of(engine).hosts == ("127.0.0.1",)


@pytest.mark.parametrize(
    "options",
    [
        {"connections": 8, "workers": 1, "slice_bytes": 4096, "window_bytes": 4096},
        {"connections": 1, "workers": 4, "slice_bytes": 1 << 30, "window_bytes": 4096},
        {"connections": 3, "workers": 3, "slice_bytes": 65537, "socket_buffer_bytes": 4096},
    ],
    ids=str,
)
def test_odd_settings_move_bytes_all_the_same(start: Start, options: dict[str, int]) -> None:
    owner, reader = start(**options), start(**options)
    check_read(reader, owner, 3 * MIB + 1)
    assert 1 <= reader.stats()["tcp"]["connections"] <= options["connections"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"conections": 2}, "conections"),
        ({"connections": 0}, r"connections is 0; it must be within 1..64"),
        ({"connections": "two"}, "connections"),
        ({"slice_bytes": 1}, "slice_bytes"),
        ({"host": ""}, "host is empty"),
        ({"port_min": 70000}, "port_min"),
        ({"port_min": 20, "port_max": 10}, "no range"),
        ({"port_max": 10}, "no range"),
        ({"hosts": "127.0.0.1,127.0.0.1"}, "repeated"),
        ({"hosts": "127.0.0.1", "interfaces": "lo"}, "give one"),
        ({"interfaces": "nic9"}, "'nic9', which is not there; known: .*lo"),
        ({"tls_ca": "ca.pem"}, "tls_ca given"),
    ],
    ids=str,
)
def test_a_wrong_option_is_named_before_anything_starts(
    start: Start, options: dict[str, str | int], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        start(**options)


def test_options_reach_the_core_as_text() -> None:
    rendered = render({"connections": 7})
    assert set(rendered) == set(TcpOptions.__struct_fields__) - {"hosts", "interfaces"}
    assert rendered["connections"] == "7"
    assert rendered["slice_bytes"] == str(MIB)


def test_a_host_that_is_not_of_this_machine_is_an_error(start: Start) -> None:
    with pytest.raises(DriverUnavailable, match=r"192\.0\.2\.1"):
        start(host="192.0.2.1")


def test_a_successor_at_the_port_is_never_written_to(start: Start, address_of: AddressOf) -> None:
    writer, old = start(), start()
    port = address_of(old).port
    remote = writer.import_region(old.allocate(4096).descriptor())
    local = writer.allocate(4096)
    writer.write(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
    old.close()
    successor = start(port_min=port)
    region = successor.allocate(4096)  # with the same id as the old one's
    region.view()[:] = b"n" * 4096
    for _ in range(2):
        with pytest.raises(PeerUnreachable, match=f"127.0.0.1:{port}.*another process"):
            writer.write(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
    assert bytes(region.view()) == b"n" * 4096
    check_read(writer, successor, MIB)


def test_a_peer_that_is_gone_is_named_with_its_address(start: Start, address_of: AddressOf) -> None:
    reader, owner = start(), start()
    port = address_of(owner).port
    remote = reader.import_region(owner.allocate(4096).descriptor())
    owner.close()
    local = reader.allocate(4096)
    with pytest.raises(PeerUnreachable, match=f"127.0.0.1:{port}: Connection refused"):
        reader.read(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)


OWNER_WITH_A_CHILD = """
import os, sys, warnings
from mooncake_transfer import TransferConfig, TransferEngine
warnings.simplefilter("ignore", DeprecationWarning)
engine = TransferEngine(TransferConfig(drivers=("tcp",)))
print(engine.allocate(4096).descriptor().hex(), flush=True)
sys.stdin.readline()
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
os._exit(0)
"""


def test_a_forked_child_does_not_hide_the_death_of_its_parent(engine: TransferEngine) -> None:
    command = [sys.executable, "-c", OWNER_WITH_A_CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        remote = engine.import_region(bytes.fromhex(owner.stdout.readline()))
        local = engine.allocate(4096)
        engine.read(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
        owner.stdin.write("fork\n")
        owner.stdin.flush()
        assert int(owner.stdout.readline()) > 0  # the child lives, until standard input ends
        engine.read(local, remote, [[0, 0, 4096]]).wait(DEADLINE_S)
        owner.kill()
        # Much sooner than any timeout of the driver would tell.
        with pytest.raises(PeerUnreachable):
            engine.read(local, remote, [[0, 0, 4096]]).wait(4.0)
