"""Options of the tcp driver, as users write them under ``TransferConfig.driver_options["tcp"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_driver_tcp.interfaces import address_of, interface_of, numa_node_of
from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import EndpointSpec

__all__ = ["TcpOptions", "endpoints", "render"]

MAX_TIMEOUT_MS = 3_600_000
# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "port_min": (0, 65535),
    "port_max": (0, 65535),
    "connections": (1, 64),
    "workers": (1, 64),
    "slice_bytes": (4096, 1 << 30),
    "window_bytes": (4096, 1 << 40),
    "socket_buffer_bytes": (0, 1 << 30),
    "connect_timeout_ms": (1, MAX_TIMEOUT_MS),
    "dead_peer_timeout_ms": (1, MAX_TIMEOUT_MS),
    "max_strangers": (1, 65536),
}
TLS_FILES = ("tls_ca", "tls_certificate", "tls_key")


class TcpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the driver. Raises ConfigError for values that cannot work.

    Attributes:
        host: name or address to listen on; ``0.0.0.0`` listens on, and tells peers of, every interface.
            Without it, the engine's own ``host``.
        hosts: addresses to listen on, with commas between, instead of ``host``: an endpoint (a rail) each.
        interfaces: the same by names of interfaces.
        advertise_host: what peers are told to connect to, with the port it listens on: the outer address of a
            container or a proxy. Empty: where it listens.
        port_min: first port to try; 0 for any free one.
        port_max: last port to try; 0 for ``port_min`` only.
        connections: connections to each peer, opened when there is enough to move for them.
        workers: threads that move bytes, of all peers together.
        slice_bytes: larger operations are cut into slices of this size, spread over the connections.
        window_bytes: bytes of requests one connection may have unanswered.
        socket_buffer_bytes: size of the kernel's send and receive buffers; 0 leaves them to the system,
            but for a send buffer of 512 KiB between processes of one host.
        connect_timeout_ms: how long reaching a peer may take, over all its addresses.
        dead_peer_timeout_ms: how long a peer may leave bytes unacknowledged before it counts as gone.
        max_strangers: connections that may be open without having said hello.
        tls_ca: PEM file of the authorities whose certificates are believed. With the next two, every
            connection is TLS 1.3 and both sides show a certificate.
        tls_certificate: PEM file of this side's certificate, good for client and server.
        tls_key: PEM file of its private key, without pass phrase.
    """

    host: str = "127.0.0.1"
    hosts: str = ""
    interfaces: str = ""
    advertise_host: str = ""
    port_min: int = 0
    port_max: int = 0
    connections: int = 2
    workers: int = 2
    slice_bytes: int = 1 << 20
    window_bytes: int = 4 << 20
    socket_buffer_bytes: int = 0
    connect_timeout_ms: int = 5000
    dead_peer_timeout_ms: int = 10_000
    max_strangers: int = 256
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("tcp option host is empty; use 0.0.0.0 for every interface")
        if self.hosts and self.interfaces:
            raise ConfigError("tcp options hosts and interfaces say the same in two ways; give one of them")
        for name in ("hosts", "interfaces"):
            listed = _listed(getattr(self, name))
            if "" in listed or len(set(listed)) != len(listed):
                raise ConfigError(f"tcp option {name} has an empty or repeated entry: {', '.join(listed)}")
            if self.advertise_host and len(listed) > 1:
                raise ConfigError(f"tcp option advertise_host is for one endpoint, {name} are {len(listed)}")
        given = [name for name in TLS_FILES if getattr(self, name)]
        if given and len(given) < len(TLS_FILES):
            raise ConfigError(
                f"tcp options for TLS: only {', '.join(given)} given; all of {TLS_FILES} needed"
            )
        check_limits("tcp", self, LIMITS)
        if self.port_max and not 1 <= self.port_min <= self.port_max:
            raise ConfigError(
                f"tcp options port_min={self.port_min}, port_max={self.port_max} are no range; "
                "give 1 <= port_min <= port_max, or neither for any free port"
            )


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings of one endpoint. Raises ConfigError."""
    return _text(checked("tcp", TcpOptions, options))


def endpoints(options: Mapping[str, object]) -> list[EndpointSpec]:
    """Check options and describe the endpoints, one for each host or interface. Raises ConfigError."""
    wanted = checked("tcp", TcpOptions, options)
    hosts = [(host, host) for host in _listed(wanted.hosts)]
    hosts += [(address_of(name), name) for name in _listed(wanted.interfaces)]
    if not hosts:
        return [EndpointSpec("", _text(wanted), numa_node_of(interface_of(wanted.host)))]
    return [
        EndpointSpec(
            device, _text(msgspec.structs.replace(wanted, host=host)), numa_node_of(interface_of(host))
        )
        for host, device in hosts
    ]


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _text(options: TcpOptions) -> dict[str, str]:
    return as_text(options, without=("hosts", "interfaces"))
