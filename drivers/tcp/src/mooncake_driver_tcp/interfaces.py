"""Network interfaces of this machine: their addresses, and the NUMA node each sits at."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

from mooncake_transfer.errors import ConfigError

__all__ = ["address_of", "interface_of", "numa_node_of"]

SYS_NET = Path("/sys/class/net")
PROC_INET6 = Path("/proc/net/if_inet6")
SIOCGIFADDR = 0x8915
LINK_LOCAL = 0x20  # a scope in /proc/net/if_inet6


def address_of(interface: str) -> str:
    """Return the address to listen on: IPv4 if there is one, else global IPv6, else link-local with scope.

    Raises ConfigError when there is no such interface, or it has no address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(
            f"tcp option interfaces names {interface!r}, which is not there; known: {', '.join(names)}"
        )
    found = [*_ipv4(interface), *_ipv6(interface)]
    if not found:
        raise ConfigError(
            f"tcp option interfaces names {interface!r}, which has no address; give it one, or leave it out"
        )
    return found[0]


def interface_of(host: str) -> str | None:
    """Return the interface that has this numeric address; None when none has, or for a wildcard or a name."""
    address, _, scope = host.partition("%")
    if scope:
        return scope
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return None
    with suppress(OSError):  # no descriptor left, say, as the driver will find out
        for _, name in socket.if_nameindex():
            own = [*_ipv4(name), *_ipv6(name)]
            if any(ipaddress.ip_address(text.partition("%")[0]) == wanted for text in own):
                return name
    return None


def numa_node_of(interface: str | None) -> int:
    """Return the NUMA node of the interface's device; -1 when unknown, as for virtual ones."""
    if interface is None:
        return -1
    with suppress(OSError, ValueError):
        return int((SYS_NET / interface / "device" / "numa_node").read_text())
    return -1


def _ipv4(interface: str) -> list[str]:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return [socket.inet_ntoa(reply[20:24])]
    return []


def _ipv6(interface: str) -> list[str]:
    found: list[tuple[int, str]] = []
    with suppress(OSError):
        for line in PROC_INET6.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface:
                text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
                local = int(scope, 16) == LINK_LOCAL
                found.append((int(local), f"{text}%{interface}" if local else text))
    return [text for _, text in sorted(found)]
