"""``host:port`` as text."""

from __future__ import annotations

from mooncake_transfer._errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Take ``host:port`` or ``[ipv6]:port`` apart. Raises ConfigError for anything else."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address {address!r} is not host:port, for example 127.0.0.1:7000 or [::1]:7000")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Put host and port together, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
