"""Where endpoints listen, and from where they connect: IPv6, several addresses, interfaces."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mooncake_driver_tcp import interfaces
from mooncake_driver_tcp.options import endpoints
from mooncake_driver_tcp.testing import Address
from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.testing import pattern

DEADLINE_S = 10.0
NBYTES = 3 << 20

Start = Callable[..., TransferEngine]
AddressOf = Callable[[TransferEngine], Address]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


def check_read(reader: TransferEngine, owner: TransferEngine) -> None:
    source, place = owner.allocate(NBYTES), reader.allocate(NBYTES)
    source.view()[:] = pattern(1, NBYTES).tobytes()
    reader.read(place, reader.import_region(source.descriptor()), [[0, 0, NBYTES]]).wait(DEADLINE_S)
    assert place.view() == source.view()


@needs_ipv6
def test_bytes_move_over_ipv6(start: Start, address_of: AddressOf) -> None:
    owner, reader = start(host="::1"), start(host="::1")
    assert address_of(owner).hosts == ("::1",)
    check_read(reader, owner)


@needs_ipv6
def test_the_ipv6_wildcard_takes_ipv4_too(start: Start, address_of: AddressOf) -> None:
    owner = start(host="::")
    assert {"::1", "127.0.0.1"} <= set(address_of(owner).hosts)
    check_read(start(host="127.0.0.1"), owner)


def test_connections_leave_from_the_address_of_the_endpoint(start: Start, address_of: AddressOf) -> None:
    owner, reader = start(host="127.0.0.1"), start(host="127.0.0.7")
    check_read(reader, owner)
    port = address_of(owner).port
    remote_end = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    sources = {row[1].split(":")[0] for row in rows if row[2] == remote_end}
    assert sources == {"0700007F"}


def test_each_listed_host_is_an_endpoint_of_its_own() -> None:
    specs = endpoints({"hosts": "127.0.0.1, 127.0.0.2", "connections": 3})
    assert [spec.device for spec in specs] == ["127.0.0.1", "127.0.0.2"]
    assert [spec.options["host"] for spec in specs] == ["127.0.0.1", "127.0.0.2"]
    assert {spec.options["connections"] for spec in specs} == {"3"}


def test_rails_of_two_addresses_both_move_bytes(start: Start) -> None:
    hosts = "127.0.0.1,127.0.0.2"
    owner, reader = start(hosts=hosts), start(hosts=hosts)
    source, place = owner.allocate(16 * NBYTES), reader.allocate(16 * NBYTES)
    source.view()[:] = pattern(4, 16 * NBYTES).tobytes()
    remote = reader.import_region(source.descriptor())
    for _ in range(8):
        reader.read(place, remote, [[0, 0, 16 * NBYTES]]).wait(DEADLINE_S)
    assert place.view() == source.view()
    moved = {rail.device for rail in reader.rails() if rail.bytes}
    assert moved == {"127.0.0.1", "127.0.0.2"}


def test_an_interface_stands_for_its_address() -> None:
    (spec,) = endpoints({"interfaces": "lo"})
    assert (spec.device, spec.options["host"], spec.numa_node) == ("lo", "127.0.0.1", -1)
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("fe80::1%lo") == "lo"
    assert interfaces.interface_of("some.name") is None


def test_bytes_move_over_a_chosen_interface(start: Start, address_of: AddressOf) -> None:
    owner, reader = start(interfaces="lo"), start(interfaces="lo")
    assert address_of(owner).hosts == ("127.0.0.1",)
    check_read(reader, owner)
    assert {rail.device for rail in reader.rails() if rail.bytes} == {"lo"}


@needs_ipv6
def test_bytes_move_over_an_interface_without_an_ipv4_address(
    start: Start, address_of: AddressOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "_ipv4", lambda interface: [])
    owner, reader = start(interfaces="lo"), start(interfaces="lo")
    assert address_of(owner).hosts == ("::1",)
    check_read(reader, owner)
    assert {rail.device for rail in reader.rails() if rail.bytes} == {"lo"}


def test_without_a_list_there_is_one_endpoint_without_a_name() -> None:
    (spec,) = endpoints({"host": "127.0.0.1"})
    assert spec.device == ""


def test_an_unknown_interface_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"nic9.*known: .*lo"):
        endpoints({"interfaces": "lo,nic9"})


def test_the_interface_is_unknown_where_no_descriptor_is_left_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> list[tuple[int, str]]:
        raise OSError("Too many open files")

    monkeypatch.setattr(socket, "if_nameindex", none_left)
    assert interfaces.interface_of("127.0.0.1") is None
