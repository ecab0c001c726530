"""``host:port`` as text, and what may be a name instead."""

from __future__ import annotations

import ipaddress
import re

from mooncake_transfer._errors import ConfigError

HOST_BYTES = 253  # RFC 1035, 2.3.4, without the lengths of the parts
HOST_NAME = re.compile(r"[\w-]+(\.[\w-]+)*\.?")


def split_address(address: str) -> tuple[str, int]:
    """Take ``host:port`` or ``[ipv6]:port`` apart. Raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    digits = port.isascii() and port.isdecimal()  # int() takes those of other scripts too
    if not colon or not host or not digits or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port, for example 127.0.0.1:7000 or [::1]:7000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Put host and port together, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_host(host: str, name: str) -> None:
    """Raise ConfigError for what can be neither an IP address nor the name of a host. Asks no resolver."""
    if ":" in host:
        try:
            ipaddress.IPv6Address(host)
            return
        except ValueError:
            pass
    elif HOST_NAME.fullmatch(host) and len(host.encode()) <= HOST_BYTES:
        return
    raise ConfigError(
        f"{name} is {host[:60]!r}, which is no host; use a name or an IP address, without a port or brackets"
    )


def is_address(text: str) -> bool:
    """Whether it has the form ``host:port``; what has not is a name."""
    return text.rpartition(":")[2].isdecimal() and ":" in text


def check_name(name: str) -> None:
    """Raise ConfigError for what cannot be the name of an engine; any other text up to 255 bytes can."""
    if "/" in name or is_address(name):
        raise ConfigError(f"name {name!r} has a slash or looks like host:port; choose another name")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"name {name!r} is no valid text: {error}") from None
    if not 1 <= size <= 255:
        raise ConfigError(f"name {name[:20]!r}... has {size} bytes; 1 to 255 are allowed")
