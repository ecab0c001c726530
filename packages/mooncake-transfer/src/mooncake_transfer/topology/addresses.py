"""IP addresses of this machine's NICs, from the kernel by rtnetlink(7)."""

from __future__ import annotations

import socket
import struct

__all__ = ["interface_addresses"]

RTM_GETADDR = 22
NLM_F_REQUEST, NLM_F_DUMP = 1, 0x300
NLMSG_ERROR, NLMSG_DONE = 2, 3
IFA_ADDRESS, IFA_LOCAL = 1, 2
LINK_SCOPE = 253
HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
ADDRESS = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
ATTRIBUTE = struct.Struct("=HH")  # length, type


def interface_addresses() -> dict[str, list[str]]:
    """Return the IPv4 and IPv6 addresses of each interface, in that order; those of link scope come last.

    Empty where the kernel gives no such socket, as in some sandboxes.
    """
    found: list[tuple[bool, int, str, str]] = []
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        ) as link:
            link.settimeout(2)
            request = ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            flags = NLM_F_REQUEST | NLM_F_DUMP
            link.send(HEADER.pack(HEADER.size + len(request), RTM_GETADDR, flags, 1, 0) + request)
            while _take_messages(link.recv(1 << 17), found):
                pass
    except OSError:  # an answer of sandboxes; a machine without addresses is what they show
        return {}
    answer: dict[str, list[str]] = {}
    for _, _, name, address in sorted(found):
        answer.setdefault(name, []).append(address)
    return answer


def _take_messages(data: bytes, found: list[tuple[bool, int, str, str]]) -> bool:
    """Add what a datagram says; return whether more is to come."""
    at = 0
    while at + HEADER.size <= len(data):
        length, kind, _, _, _ = HEADER.unpack_from(data, at)
        if kind in (NLMSG_DONE, NLMSG_ERROR) or length < HEADER.size:
            return False
        family, _, _, scope, index = ADDRESS.unpack_from(data, at + HEADER.size)
        address = _address_in(data[at + HEADER.size + ADDRESS.size : at + length], family)
        if address:
            found.append((scope == LINK_SCOPE, family, socket.if_indextoname(index), address))
        at += (length + 3) & ~3
    return True


def _address_in(attributes: bytes, family: int) -> str:
    """The address among the attributes: on a point-to-point link the local one, not the peer's."""
    values = {}
    at = 0
    while at + ATTRIBUTE.size <= len(attributes):
        length, kind = ATTRIBUTE.unpack_from(attributes, at)
        if length < ATTRIBUTE.size:
            break
        values[kind] = attributes[at + ATTRIBUTE.size : at + length]
        at += (length + 3) & ~3
    raw = values.get(IFA_LOCAL) or values.get(IFA_ADDRESS)
    return socket.inet_ntop(family, raw) if raw else ""
