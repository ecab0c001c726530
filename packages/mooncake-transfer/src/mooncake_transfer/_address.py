"""``host:port`` as text, and what may be a name instead."""

from __future__ import annotations

from mooncake_transfer._errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Take ``host:port`` or ``[ipv6]:port`` apart. Raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port, for example 127.0.0.1:7000 or [::1]:7000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Put host and port together, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
