"""Sockets that listen where a user says: a name, an IPv4 or IPv6 address, also a link-local one."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from mooncake_transfer._address import join_address

__all__ = ["bindable", "is_wildcard", "join_address", "listen"]


def listen(host: str, port: int, *, backlog: int = 1024) -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises OSError when the address cannot be had."""
    family, where = bindable(host, port)
    return socket.create_server(where, family=family, backlog=backlog)


def bindable(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """The family of ``host``, IPv4 where a name has both, and what ``socket.bind`` takes in that family.

    Given ``(host, port)``, ``bind`` would lose the interface of ``fe80::1%eth0``. Raises OSError for a name
    that is not known, or cannot be one.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(f"{host!r} cannot be the name of a host: {error}") from None
    family, _, _, _, where = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, where


def is_wildcard(host: str) -> bool:
    """Whether it stands for every interface, however written: empty, ``0``, ``0.0.0.0``, ``::``, ``0::0``."""
    try:
        if ":" not in host:
            return not host or socket.inet_aton(host) == bytes(4)
        address = ipaddress.IPv6Address(host)
        return (address.ipv4_mapped or address).is_unspecified
    except (OSError, ValueError):  # a name
        return False
