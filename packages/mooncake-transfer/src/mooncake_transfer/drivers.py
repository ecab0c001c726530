"""Which drivers this process may use: found through plugins, probed, and loaded on demand."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_transfer._errors import DriverUnavailable
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable
from mooncake_transfer.plugins import driver_plugins

__all__ = ["DriverStatus", "probe_drivers", "select_drivers"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What a probe said about one driver."""

    name: str
    priority: int
    usable: bool
    devices: tuple[str, ...] = ()
    reason: str = ""


def _probe(info: DriverInfo) -> DriverStatus:
    try:
        found = info.probe()
    except Exception as error:  # a third party's probe: its failure is the reason that is shown
        log.exception("probe of driver %s failed", info.name, extra={"driver": info.name})
        found = Unavailable(f"its probe failed: {type(error).__name__}: {error}")
    if isinstance(found, Available):
        return DriverStatus(info.name, info.priority, True, devices=found.devices)
    return DriverStatus(info.name, info.priority, False, reason=found.reason)


def probe_drivers() -> list[DriverStatus]:
    """Probe every installed driver, highest priority first."""
    return [_probe(info) for info in driver_plugins().drivers()]


def select_drivers(wanted: Sequence[str] | None) -> list[tuple[DriverInfo, DriverStatus]]:
    """Drivers an engine shall use, highest priority first, with what their probes said.

    With ``wanted`` None: every installed driver (unusable ones are returned with their reason).
    Raises DriverUnavailable when a driver named in ``wanted`` is not installed or not usable.
    """
    installed = {info.name: info for info in driver_plugins().drivers()}
    for name in wanted or ():
        if name not in installed:
            raise DriverUnavailable(
                f"driver {name!r} is not installed (found: {sorted(installed) or 'none'}); "
                f"try `pip install mooncake-driver-{name}`; `mooncake doctor` shows what failed to load"
            )
    asked_for = [info for info in installed.values() if wanted is None or info.name in wanted]
    chosen = [(info, _probe(info)) for info in asked_for]
    for info, status in chosen:
        if wanted is not None and not status.usable:
            raise DriverUnavailable(f"driver {info.name!r} cannot be used here: {status.reason}")
    return chosen
