"""Where servers listen, and that what is told of them leads there."""

from __future__ import annotations

import socket

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.listening import bindable, is_wildcard, join_address, listen

LOOPBACK = socket.if_nametoindex("lo")


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("", socket.AF_INET)]
)
def test_a_socket_listens_at_addresses_of_both_kinds(host: str, family: socket.AddressFamily) -> None:
    try:
        listener = listen(host, 0)
    except OSError as error:
        if family == socket.AF_INET6:
            pytest.skip(f"no IPv6 here: {error}")
        raise
    with listener, socket.create_connection((host or "127.0.0.1", listener.getsockname()[1]), timeout=30):
        assert listener.family == family


def test_the_interface_of_a_link_local_address_is_kept() -> None:
    family, where = bindable("fe80::1%lo", 7000)
    assert (family, where) == (socket.AF_INET6, ("fe80::1", 7000, 0, LOOPBACK))


def test_a_name_with_both_kinds_of_address_is_taken_at_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 7000, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 7000)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert bindable("a.name", 7000) == (socket.AF_INET, ("127.0.0.1", 7000))


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_what_cannot_be_a_name_is_an_error_of_the_system(host: str) -> None:
    with pytest.raises(OSError, match=r"cannot be the name of a host|not known|failure in name"):
        listen(host, 0)


def test_a_port_that_is_taken_is_an_error_of_the_system() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", taken.getsockname()[1])


def test_an_ipv6_address_is_told_from_its_port_by_brackets() -> None:
    assert join_address("::1", 7000) == "[::1]:7000"
    assert join_address("fe80::1%eth0", 7000) == "[fe80::1%eth0]:7000"
    assert join_address("a.name", 7000) == "a.name:7000"


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "0", "0x0", "0.0", "::", "::0", "0:0:0:0:0:0:0:0", "::ffff:0.0.0.0"]
)
def test_every_interface_is_told_in_any_form(host: str) -> None:
    assert is_wildcard(host)
    with pytest.raises(ConfigError, match="set advertise_host"):
        TransferEngine(TransferConfig(host=host))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.0.0.0", "::1", "fe80::1%lo", "localhost", "0.example", ":::"]
)
def test_one_interface_is_no_wildcard(host: str) -> None:
    assert not is_wildcard(host)
