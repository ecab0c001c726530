"""Opens the drivers of an engine: one endpoint each, or one for each of their devices."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mooncake_transfer._core import Engine as CoreEngine
from mooncake_transfer._errors import ConfigError, DriverUnavailable
from mooncake_transfer._placing import place_devices
from mooncake_transfer.config import TransferConfig
from mooncake_transfer.drivers import DriverStatus, select_drivers
from mooncake_transfer.hooks import DriverInfo, EndpointSpec, Unavailable
from mooncake_transfer.memory import Memory, allocate_shareable
from mooncake_transfer.plugins import driver_plugins
from mooncake_transfer.tls import driver_options

log = logging.getLogger(__name__)


def open_drivers(core: CoreEngine, config: TransferConfig) -> dict[str, DriverStatus]:
    """Open every driver that the configuration asks for, or every usable one; return what became of each.

    Raises ConfigError for options of drivers that are not there, or an ``allocate_from`` that has no memory;
    DriverUnavailable when a driver that was asked for, or has options, does not start, or none does.
    """
    installed = [info.name for info in driver_plugins().drivers()]
    for name in config.driver_options:
        if name not in installed:
            near = difflib.get_close_matches(name, installed, 1, 0.5)
            remedy = f"did you mean {near[0]!r}?" if near else "install the package that has it"
            raise ConfigError(
                f"driver_options names driver {name!r}, which is not installed; {remedy} "
                f"(installed: {', '.join(sorted(installed)) or 'none'})"
            )
    if config.allocate_from:
        _allocator(config.allocate_from)
    nodes = place_devices(core, config)
    drivers: dict[str, DriverStatus] = {}
    for info, status in select_drivers(config.drivers, config.driver_options):
        drivers[info.name] = _open_driver(core, config, info, status, nodes) if status.usable else status
    if not any(status.usable for status in drivers.values()):
        reasons = "; ".join(f"{status.name}: {status.reason}" for status in drivers.values())
        none = "none is installed; try `pip install mooncake-driver-tcp`"
        raise DriverUnavailable(f"no driver can be used here ({reasons or none})")
    return drivers


def _open_driver(
    core: CoreEngine, config: TransferConfig, info: DriverInfo, status: DriverStatus, nodes: dict[str, int]
) -> DriverStatus:
    opened = 0
    reasons = []

    def lose(place: str, error: Exception) -> None:  # a third party's code; the other drivers still work
        if config.drivers is not None:
            raise DriverUnavailable(f"driver {info.name!r} does not start{place}: {error}") from error
        log.warning("driver %s does not start%s: %s", info.name, place, error, extra={"driver": info.name})
        reasons.append(f"it does not start{place}: {error}")

    specs: Sequence[EndpointSpec] | Unavailable = ()
    try:
        specs = _endpoints(config, info)
    except ConfigError:  # the user's options
        raise
    except Exception as error:  # noqa: BLE001 - a third party's code; lose() tells
        lose("", error)
    if isinstance(specs, Unavailable):
        if config.drivers is not None:
            raise DriverUnavailable(f"driver {info.name!r} does not start: {specs.reason}")
        return DriverStatus(info.name, info.priority, False, reason=specs.reason)
    for spec in specs:
        try:
            node = nodes.get(spec.device, spec.numa_node)
            core.add_endpoint(info.load(), info.name, spec.device, node, list(spec.options.items()))
            opened += 1
        except Exception as error:  # noqa: BLE001 - a third party's code; lose() tells
            lose(f" on {spec.device}" if spec.device else "", error)
    if opened:
        return status
    # Options are for a driver that shall be there: without it everything would go another way.
    if reasons and config.driver_options.get(info.name):
        raise DriverUnavailable(f"driver {info.name!r} does not start, and has options: {'; '.join(reasons)}")
    return DriverStatus(info.name, info.priority, False, reason="; ".join(reasons))


def examine_drivers(config: TransferConfig) -> list[DriverStatus]:
    """What an engine of this configuration would make of every installed driver, best first; opens none."""
    found = select_drivers(None, config.driver_options)
    return [_examined(config, info, status) for info, status in found]


def _examined(config: TransferConfig, info: DriverInfo, status: DriverStatus) -> DriverStatus:
    if not status.usable:
        return status
    try:
        specs = _endpoints(config, info)
    except Exception as error:  # noqa: BLE001 - a third party's code, or its options; the others count too
        specs = Unavailable(f"it does not start: {error}")
    if not isinstance(specs, Unavailable):
        return status
    return DriverStatus(info.name, info.priority, False, reason=specs.reason)


def _endpoints(config: TransferConfig, info: DriverInfo) -> Sequence[EndpointSpec] | Unavailable:
    options = dict(config.driver_options.get(info.name, {}))
    if info.network:
        options = {**driver_options(config.tls), **options}
        if not options.keys() & {"hosts", "interfaces"}:
            options.setdefault("host", config.host)
    if info.endpoints is None:
        return [EndpointSpec("", info.options(options))]
    return info.endpoints(options)


def allocate(config: TransferConfig, driver: str, nbytes: int, name: str, pages: Mapping[str, Any]) -> Memory:
    """Memory of the driver's own, as ``DriverInfo.allocate`` gives it, or main memory when it is empty.

    ``pages``: what ``allocate_shareable`` takes by name; only for main memory. Raises ConfigError for a
    driver that is not there or has none, and what the driver raises.
    """
    if not driver:
        return allocate_shareable(nbytes, name, **pages)
    if nbytes <= 0:
        raise ConfigError(f"cannot allocate {nbytes} bytes for region {name!r}; the size must be positive")
    if any(value is not False and value is not None for value in pages.values()):
        raise ConfigError(f"driver {driver!r} decides on pages and node of its memory: leave them out")
    return _allocator(driver)(config.driver_options.get(driver, {}), name, nbytes)


def _allocator(driver: str) -> Callable[[Mapping[str, Any], str, int], Memory]:
    """The driver's ``allocate``. Raises ConfigError for a driver that is not there or has none."""
    able = {info.name: info.allocate for info in driver_plugins().drivers() if info.allocate is not None}
    if driver not in able:
        known = ", ".join(sorted(able)) or "none"
        raise ConfigError(f"driver {driver!r} has no memory of its own; drivers that do: {known}")
    return able[driver]
