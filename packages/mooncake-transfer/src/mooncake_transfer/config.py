"""Configuration of a transfer engine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from mooncake_transfer._address import check_host, check_name
from mooncake_transfer._arguments import check_fields, number, shown
from mooncake_transfer._errors import ConfigError
from mooncake_transfer.layers import Settings, from_environment, from_toml
from mooncake_transfer.tls import TlsConfig

__all__ = ["LoadedConfig", "RailConfig", "TransferConfig", "load_config"]

ENVIRONMENT_PREFIX = "MOONCAKE_TRANSFER_"
FILE_VARIABLE = "MOONCAKE_CONFIG"
MAX_THREADS = 1024

OptionValue = str | int | float | bool


TIMES = (
    "connect_timeout_s",
    "call_timeout_s",
    "transfer_timeout_s",
    "close_timeout_s",
    "fence_timeout_s",
    "registry_ttl_s",
    "registry_timeout_s",
    "peer_timeout_s",
)


# Of the numbers of RailConfig, as the core counts them.
LARGEST = {
    "slice_bytes": (1 << 64) - 1,
    "probe_every": (1 << 32) - 1,
    "breaker_errors": (1 << 32) - 1,
    "attempts": (1 << 32) - 1,
}


class RailConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine spreads transfers over rails, and when it gives one up.

    Attributes:
        slice_bytes: how a transfer is cut when several rails share it.
        slow_ratio: a rail so many times slower than the best one gets no more than probes.
        probe_every: one slice in so many goes to the next rail in turn, whatever is predicted; 0: never.
        breaker_errors: incidents within ``breaker_window_s`` that pause a rail, whatever succeeds between.
        breaker_window_s: see ``breaker_errors``.
        breaker_pause_s: the first pause; a rail that then fails again is paused twice as long.
        breaker_max_pause_s: the longest pause.
        suspect_pause_s: how long other rails are preferred after a single incident.
        attempts: how many rounds through all rails a slice gets before its transfer fails; 1: no second try.
        aging_s: waiting so long makes up for one priority class.
    """

    slice_bytes: int = 1 << 20
    slow_ratio: float = 4.0
    probe_every: int = 100
    breaker_errors: int = 3
    breaker_window_s: float = 10.0
    breaker_pause_s: float = 30.0
    breaker_max_pause_s: float = 300.0
    suspect_pause_s: float = 0.1
    attempts: int = 2
    aging_s: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, "rails.")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"rails.{name} is {value}; it must be a positive number")
            if value < 0 or (value == 0 and name != "probe_every"):
                raise ConfigError(f"rails.{name} is {shown(value)}; it must be a positive number")
            if isinstance(value, int):
                number(value, f"rails.{name}", most=LARGEST[name])


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine. Raises ConfigError for values that cannot work.

    Attributes:
        host: name or IP of this machine to listen on for other engines; 0.0.0.0 for all of them. Link-local
            ones with their interface (``fe80::1%eth0``), which peers are not told: they use their own.
        advertise_host: what peers are told to connect to; empty: ``host``.
        port: port of the channel; 0 takes any free one.
        port_range: first and last port to try for the channel instead, for hosts behind a firewall.
        tls: encrypts the channel, both sides prove who they are; None: neither.
        drivers: names of the drivers to use; None takes every usable installed one.
        driver_options: per driver, options as its README lists them. One that can be used here and has
            options must start: otherwise the engine does not either.
        allocate_from: driver whose own memory ``allocate()`` gives, such as ``cxl``; empty: main memory.
        connect_timeout_s: how long reaching a peer may take.
        call_timeout_s: how long an answer of a peer's handler may take.
        transfer_timeout_s: how long ``Transfer.wait()`` waits when not told otherwise.
        close_timeout_s: how long closing a region waits for peers that still use it.
        fence_timeout_s: how long a write waits for its peer to drop what is left of one that failed over
            another rail; it fails when the peer does not.
        peer_timeout_s: how long a peer's host may answer nothing, not even that bytes have arrived, before
            its connections count as lost. It may take 3 s more to notice.
        handler_threads: how many handlers of ``serve()`` may run at once, 1 to 1024; further calls wait. The
            engine's own methods (checksums, fences, regions by name, stats) have one thread beside them.
        topology: file that corrects what the machine says of its topology (``topology.Override``); or empty.
        registry: URL of the registry that knows engines by name: ``memory:NAME``, ``http://host:port``,
            ``etcd://host:2379``, ``redis://host:6379/0``; empty: no names. See the package's README.
        name: what this engine is called there; empty: it only looks others up.
        registry_ttl_s: how long the registry keeps the name of an engine that died.
        registry_timeout_s: how long a question to the registry may take.
        metrics_port: port of ``host`` that serves ``/metrics`` for Prometheus; 0 takes any free one, None
            serves none. Needs the extra ``metrics``.
        rails: how transfers are spread over several NICs or addresses, and when one is given up.
        integrity: compare checksums (xxh3-64) of both ends after moving: ``off``, ``sample`` or ``full``.
            Then a write with a descriptor of access ``w`` needs ``verify=False``.
            Bytes that differ are moved again; ``wait()`` raises IntegrityError when that does not help.
        integrity_sample: with ``sample``, the share of ranges that is compared, over 0 and up to 1. A range
            is a block, or 1 MiB of a longer one; which ones, is chosen at random.
    """

    host: str = "127.0.0.1"
    advertise_host: str = ""
    port: int = 0
    port_range: tuple[int, int] | None = None
    tls: TlsConfig | None = None
    drivers: tuple[str, ...] | None = None
    driver_options: dict[str, dict[str, OptionValue]] = {}
    allocate_from: str = ""
    connect_timeout_s: float = 5.0
    call_timeout_s: float = 30.0
    transfer_timeout_s: float = 60.0
    close_timeout_s: float = 10.0
    fence_timeout_s: float = 5.0
    peer_timeout_s: float = 15.0
    handler_threads: int = 4
    topology: str = ""
    registry: str = ""
    name: str = ""
    registry_ttl_s: float = 15.0
    registry_timeout_s: float = 2.0
    metrics_port: int | None = None
    rails: RailConfig = RailConfig()
    integrity: Literal["off", "sample", "full"] = "off"
    integrity_sample: float = 0.01

    @classmethod
    def load(cls, file: str | Path | None = None, **arguments: Any) -> TransferConfig:
        """Read file, environment and keyword arguments, later ones first; see ``load_config``."""
        return load_config(file, **arguments).config

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_ports()
        for name in TIMES:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")
        self._check_integrity()
        if not 1 <= self.handler_threads <= MAX_THREADS:
            raise ConfigError(f"handler_threads is {self.handler_threads}; it must be 1 to {MAX_THREADS}")
        if self.drivers is not None and not self.drivers:
            raise ConfigError("drivers is empty; name at least one, or use None for every usable driver")
        for name in ("host", "advertise_host"):
            if given := getattr(self, name):
                check_host(given, name)
        if self.name:
            check_name(self.name)
            if not self.registry:
                raise ConfigError(f"name is {self.name!r} but registry is empty; set a registry's URL too")

    def _check_ports(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535; use 0 for any free port")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port is {self.metrics_port}; it must be within 0..65535, or None")
        if self.port_range is not None:
            if self.port:
                raise ConfigError(f"port is {self.port} and port_range {self.port_range}; set one of them")
            if not 1 <= self.port_range[0] <= self.port_range[1] <= 65535:
                raise ConfigError(f"port_range {self.port_range} is no first and last port within 1..65535")

    def _check_integrity(self) -> None:
        if self.integrity not in ("off", "sample", "full"):
            raise ConfigError(f"integrity is {self.integrity!r}; it must be 'off', 'sample' or 'full'")
        if not 0 < self.integrity_sample <= 1:
            raise ConfigError(f"integrity_sample is {self.integrity_sample}; it must lie in (0, 1]")


class LoadedConfig(msgspec.Struct, frozen=True):
    """A configuration and, by dotted path such as ``rails.attempts``, what set each value that is set."""

    config: TransferConfig
    origins: dict[str, str]


def load_config(
    file: str | Path | None = None, *, environment: Mapping[str, str] | None = None, **arguments: Any
) -> LoadedConfig:
    """Defaults, then a TOML file, then the environment, then ``arguments``.

    The file is the one given or else named by MOONCAKE_CONFIG; its ``[transfer]`` table counts. A variable
    MOONCAKE_TRANSFER_PORT sets ``port``, MOONCAKE_TRANSFER_RAILS__ATTEMPTS ``rails.attempts``; lists are
    separated by commas. ``environment`` stands for the process's own. Raises ConfigError for a file that
    cannot be read, a key that is no setting (with the nearest that is), and a value that cannot work.
    """
    environment = os.environ if environment is None else environment
    settings = Settings(TransferConfig)
    file = file or environment.get(FILE_VARIABLE)
    if file:
        try:
            text = Path(file).read_bytes()
        except OSError as error:
            raise ConfigError(f"configuration {file} cannot be read: {error.strerror or error}") from None
        settings.add(from_toml(text, str(file)), str(file))
    for variable, values in from_environment(environment, ENVIRONMENT_PREFIX):
        settings.add(values, variable)
    settings.add(arguments, "argument")
    try:
        config = msgspec.convert(settings.values, TransferConfig, strict=False)
    except msgspec.ValidationError as error:
        where = str(error).rpartition("`$.")[2].rstrip("`") if "`$." in str(error) else ""
        origin = settings.origins.get(where.partition("[")[0])
        raise ConfigError(f"{origin or 'configuration'}: {error}") from None
    return LoadedConfig(config, settings.origins)
