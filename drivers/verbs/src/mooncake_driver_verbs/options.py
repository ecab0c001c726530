"""Options of the verbs driver, as users write them under ``TransferConfig.driver_options["verbs"]``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from mooncake_driver_verbs.devices import Port, ports
from mooncake_transfer.driver_options import as_text, check_limits, checked
from mooncake_transfer.errors import ConfigError
from mooncake_transfer.hooks import EndpointSpec

__all__ = ["VerbsOptions", "endpoints", "render"]

MAX_TIMEOUT_MS = 3_600_000
MAX_QUEUE_PAIRS = 1 << 16  # that an endpoint tells apart
MTUS = (0, 256, 512, 1024, 2048, 4096)
# Inclusive; the compiled core checks the same limits.
LIMITS: dict[str, tuple[float, float]] = {
    "gid_index": (-1, 255),
    "control_port": (0, 65535),
    "qps": (1, 16),
    "send_depth": (32, 8192),
    "completion_depth": (64, 1 << 20),
    "queue_depth": (1, 1 << 20),
    "slice_bytes": (4096, 1 << 30),
    "window_bytes": (4096, 1 << 40),
    "inline_bytes": (0, 1024),
    "traffic_class": (0, 255),
    "service_level": (0, 15),
    "pkey_index": (0, 65535),
    "timeout": (1, 31),
    "retries": (0, 7),
    "rd_atomic": (1, 255),
    "chunk_bytes": (1 << 20, 1 << 46),
    "registration_threads": (1, 64),
    "max_connections": (1, 65536),
    "connect_timeout_ms": (1, MAX_TIMEOUT_MS),
    "dead_peer_timeout_ms": (1, MAX_TIMEOUT_MS),
}


class VerbsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the driver. Raises ConfigError for values that cannot work.

    Attributes:
        devices: which to use, with commas between: ``mlx5_0`` or ``mlx5_0:1`` (its port 1). One endpoint, so
            one rail, each. Empty: every port that is active.
        library: path of libibverbs; empty: the system's.
        host: where the control socket listens, through which peers exchange what queue pairs and keys need.
            Without it, the engine's own ``host``.
        control_port: its port; 0 for any free one.
        gid_index: which address of the port to use; -1: the best one.
        qps: queue pairs to each peer.
        send_depth: work requests that one queue pair may have outstanding, rounded down to a power of two.
        completion_depth: and all of an endpoint together.
        queue_depth: how many operations may be under way or waiting to be fetched.
        slice_bytes: longer operations are cut into slices of at most this, and of at least 64 KiB, spread
            over the queue pairs; none is longer than what the device was seen to move in 100 us.
        window_bytes: bytes that a connection may have outstanding.
        inline_bytes: writes up to this size travel inside the work request, where the device can.
        mtu: largest packet; 0: the port's.
        traffic_class: of packets (RoCE: DSCP and ECN; InfiniBand: traffic class).
        service_level: of packets (InfiniBand: SL; RoCE: priority).
        pkey_index: which partition key.
        timeout: how long to wait for an acknowledgement, 4.096 us * 2 ** timeout.
        retries: how often to send again before the peer counts as gone.
        rd_atomic: reads that one queue pair may have outstanding, as far as both devices can.
        relaxed_ordering: let writes of the device to memory pass one another, where it can.
        chunk_bytes: longer memory is registered in chunks of this size, rounded down to a power of two.
        registration_threads: how many of them at the same time.
        max_connections: peers that may have queue pairs; idle ones beyond lose theirs until they are needed.
            Times ``qps`` at most 65,536.
        connect_timeout_ms: how long a peer may take to answer, over all its addresses.
        dead_peer_timeout_ms: how long the control socket may be unacknowledged before a peer counts as gone.
    """

    devices: str = ""
    library: str = ""
    host: str = "127.0.0.1"
    control_port: int = 0
    gid_index: int = -1
    qps: int = 2
    send_depth: int = 128
    completion_depth: int = 16384
    queue_depth: int = 8192
    slice_bytes: int = 1 << 20
    window_bytes: int = 16 << 20
    inline_bytes: int = 128
    mtu: int = 0
    traffic_class: int = 0
    service_level: int = 0
    pkey_index: int = 0
    timeout: int = 14
    retries: int = 7
    rd_atomic: int = 16
    relaxed_ordering: bool = True
    chunk_bytes: int = 16 << 30
    registration_threads: int = 4
    max_connections: int = 1024
    connect_timeout_ms: int = 5000
    dead_peer_timeout_ms: int = 10_000

    def __post_init__(self) -> None:
        check_limits("verbs", self, LIMITS)
        if self.mtu not in MTUS:
            raise ConfigError(f"verbs option mtu is {self.mtu}; it must be one of {MTUS}")
        if self.max_connections * self.qps > MAX_QUEUE_PAIRS:
            raise ConfigError(
                f"verbs options max_connections and qps ask for {self.max_connections} * {self.qps} queue"
                f" pairs; an endpoint has at most {MAX_QUEUE_PAIRS:,}: lower one of them"
            )
        if not self.host:
            raise ConfigError("verbs option host is empty; use 0.0.0.0 for every interface")
        for name, port in _listed(self.devices):
            if not name or port < 0:
                raise ConfigError(
                    f"verbs option devices is {self.devices!r}; give names, or NAME:PORT, with commas between"
                )


def render(options: Mapping[str, object]) -> Mapping[str, str]:
    """Check options and turn them into the strings of one endpoint. Raises ConfigError."""
    return endpoints(options)[0].options


def endpoints(options: Mapping[str, object]) -> list[EndpointSpec]:
    """Check options and describe the endpoints, one for each port. Raises ConfigError."""
    return endpoints_of(checked("verbs", VerbsOptions, options), ports())


def endpoints_of(options: VerbsOptions, found: list[Port]) -> list[EndpointSpec]:
    """Choose among the ports of the machine. Raises ConfigError for one that is not there, or is down."""
    text = as_text(options, without=("devices",))
    if not options.devices:
        active = [port for port in found if port.active]
        return [_spec(text, port) for port in active] or [
            EndpointSpec("", {**text, "device": "", "port": "0"})
        ]
    chosen = []
    for name, number in _listed(options.devices):
        of_name = [port for port in found if port.device == name and number in (0, port.number)]
        if options.library and not of_name:  # a library of its own may know devices that sysfs does not
            chosen.append(EndpointSpec(name, {**text, "device": name, "port": str(number)}))
            continue
        active = [port for port in of_name if port.active]
        if not active:
            known = ", ".join(f"{port.device}:{port.number} ({port.state})" for port in found) or "none"
            raise ConfigError(
                f"verbs option devices names {name!r}, which has no active port; there are: {known}"
            )
        chosen += [_spec(text, port) for port in active]
    return chosen


def _spec(text: Mapping[str, str], port: Port) -> EndpointSpec:
    options = {**text, "device": port.device, "port": str(port.number)}
    return EndpointSpec(f"{port.device}:{port.number}", options, port.numa_node)


def _listed(text: str) -> list[tuple[str, int]]:
    """Split ``a,b:2`` into names and ports: 0 for any, -1 for one that is no number."""
    pairs = [part.strip().partition(":") for part in text.split(",")] if text else []
    return [(name, (int(port) if port.isdigit() else -1) if colon else 0) for name, colon, port in pairs]
