"""Options of the tcp driver, as users write them under ``TransferConfig.driver_options["tcp"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_transfer.errors import ConfigError

__all__ = ["TcpOptions", "render"]

MAX_TIMEOUT_MS = 3_600_000
# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[int, int]] = {
    "port_min": (0, 65535),
    "port_max": (0, 65535),
    "connections": (1, 64),
    "workers": (1, 64),
    "slice_bytes": (4096, 1 << 30),
    "window_bytes": (4096, 1 << 40),
    "socket_buffer_bytes": (0, 1 << 30),
    "connect_timeout_ms": (1, MAX_TIMEOUT_MS),
    "dead_peer_timeout_ms": (1, MAX_TIMEOUT_MS),
}


class TcpOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one endpoint. Raises ConfigError for values that cannot work.

    Attributes:
        host: name or address to listen on; ``0.0.0.0`` listens on, and tells peers of, every interface.
            Without it, the engine's own ``host``.
        advertise_host: what peers are told to connect to, with the port it listens on: the outer address of a
            container or a proxy. Empty: where it listens.
        port_min: first port to try; 0 for any free one.
        port_max: last port to try; 0 for ``port_min`` only.
        connections: connections to each peer, opened when there is enough to move for them.
        workers: threads that move bytes, of all peers together.
        slice_bytes: larger operations are cut into slices of this size, spread over the connections.
        window_bytes: bytes of requests one connection may have unanswered.
        socket_buffer_bytes: size of the kernel's send and receive buffers; 0 leaves them to the system,
            but for a small send buffer between processes of one host.
        connect_timeout_ms: how long reaching a peer may take, over all its addresses.
        dead_peer_timeout_ms: how long a peer may leave bytes unacknowledged before it counts as gone.
    """

    host: str = "127.0.0.1"
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

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("tcp option host is empty; use 0.0.0.0 for every interface")
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ConfigError(f"tcp option {name} is {value}; it must be within {least}..{most}")
        if self.port_max and not 1 <= self.port_min <= self.port_max:
            raise ConfigError(
                f"tcp options port_min={self.port_min}, port_max={self.port_max} are no range; "
                "give 1 <= port_min <= port_max, or neither for any free port"
            )


def render(options: Mapping[str, object]) -> dict[str, str]:
    """Check options and turn them into the strings that the compiled core reads. Raises ConfigError."""
    try:
        checked = msgspec.convert(dict(options), TcpOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(TcpOptions.__struct_fields__)
        raise ConfigError(f"tcp driver options {dict(options)!r}: {error}; known options: {known}") from error
    return {name: str(value) for name, value in msgspec.structs.asdict(checked).items()}
