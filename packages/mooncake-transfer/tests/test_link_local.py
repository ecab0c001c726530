"""Which interface a link-local address is reached by; two hosts do so in tests/faults."""

from __future__ import annotations

import pytest

from mooncake_transfer import TransferConfig, TransferEngine, _link_local
from mooncake_transfer._link_local import with_interface, without_interface
from mooncake_transfer.errors import PeerUnreachable

PEER = "fe80::2"
ADDRESSES = {"lo": ["127.0.0.1", "::1"], "near0": ["10.0.0.1", "fd00::1", "fe80::1"], "far0": ["fe80::3"]}


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What this machine has, to be changed by a test."""
    found = {name: list(texts) for name, texts in ADDRESSES.items()}
    monkeypatch.setattr(_link_local, "interface_addresses", lambda: found)
    return found


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("fe80::1%eth0", "fe80::1"),
        ("fe80::1%3", "fe80::1"),
        ("fe80::1", "fe80::1"),
        ("10.0.0.1", "10.0.0.1"),
        ("a.name", "a.name"),
        ("no%name", "no%name"),
    ],
)
def test_peers_are_told_no_interface(host: str, told: str) -> None:
    assert without_interface(host) == told


@pytest.mark.parametrize("host", ["10.0.0.2", "::1", "fd00::2", "a.name", "fe80::2%other0"])
def test_other_addresses_and_those_that_name_an_interface_stay_as_they_are(
    addresses: dict[str, list[str]], host: str
) -> None:
    assert with_interface(host, "fe80::1%near0") == host


def test_the_interface_of_the_own_host_comes_first(addresses: dict[str, list[str]]) -> None:
    assert with_interface(PEER, "fe80::3%far0") == "fe80::2%far0"
    assert with_interface("fe80::1", "fe80::3%far0") == "fe80::1%far0"


def test_then_the_one_that_has_the_address_then_the_only_one(addresses: dict[str, list[str]]) -> None:
    assert with_interface("fe80::3", "127.0.0.1") == "fe80::3%far0"
    assert with_interface("fe80:0::3", "10.0.0.1") == "fe80:0::3%far0"
    del addresses["far0"]
    assert with_interface(PEER, "127.0.0.1") == "fe80::2%near0"


def test_several_or_none_are_an_error_that_says_what_to_write(addresses: dict[str, list[str]]) -> None:
    with TransferEngine(TransferConfig(drivers=("tcp",))) as engine:
        with pytest.raises(
            PeerUnreachable, match=r"fe80::2 is link-local, and any of near0, far0 could.*host"
        ):
            engine.connect("[fe80::2]:7000")
        addresses.clear()
        with pytest.raises(PeerUnreachable, match=r"no interface here has .*\[fe80::2%eth0\]:port"):
            engine.connect("[fe80::2]:7000")
