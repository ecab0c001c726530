"""Which drivers this process may use: found through plugins, probed, and loaded on demand."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from mooncake_transfer._errors import DriverUnavailable
from mooncake_transfer._probing import Question, probe_apart, probe_here, question
from mooncake_transfer.hooks import Available, DriverInfo, Unavailable
from mooncake_transfer.plugins import driver_plugins

__all__ = ["DriverStatus", "probe_drivers", "select_drivers"]

Options = Mapping[str, Mapping[str, object]]  # by driver, as TransferConfig.driver_options
NO_OPTIONS: Options = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """What a probe said about one driver."""

    name: str
    priority: int
    usable: bool
    devices: tuple[str, ...] = ()
    reason: str = ""


class _Verdicts:
    """What probes in a process of their own said. It is asked for again after ``AGE_S`` seconds."""

    AGE_S = 60.0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[Question, tuple[float, Available | Unavailable]] = {}

    def of(self, questions: Sequence[Question]) -> dict[str, Available | Unavailable]:
        with self._lock:
            old = time.monotonic() - self.AGE_S
            self._known = {q: said for q, said in self._known.items() if said[0] >= old}
            asked = [q for q in questions if q not in self._known]
            verdicts = probe_apart(asked)
            now = time.monotonic()
            self._known.update({q: (now, verdicts[q.driver]) for q in asked})
            return {q.driver: self._known[q][1] for q in questions}


_verdicts = _Verdicts()


def _forget() -> None:
    # Another thread of the parent may have held its lock for ever.
    global _verdicts
    _verdicts = _Verdicts()


os.register_at_fork(after_in_child=_forget)


def _probe(described: Sequence[tuple[str | None, DriverInfo]], options: Options) -> list[DriverStatus]:
    foreign = [
        question(info, origin, options.get(info.name, {}))
        for origin, info in described
        if origin is not None and not info.trusted_probe
    ]
    apart = _verdicts.of(foreign)
    statuses = []
    for _, info in described:
        found = apart.get(info.name) or probe_here(info, options.get(info.name, {}))
        if isinstance(found, Available):
            statuses.append(DriverStatus(info.name, info.priority, True, devices=found.devices))
        else:
            statuses.append(DriverStatus(info.name, info.priority, False, reason=found.reason))
    return statuses


def probe_drivers(options: Options = NO_OPTIONS) -> list[DriverStatus]:
    """Probe every installed driver, highest priority first.

    ``options``: the user's, by driver, as in ``TransferConfig.driver_options``. A probe that is not
    ``trusted_probe`` runs in a process of its own, with a deadline, and its answer holds for a minute.
    """
    return _probe(driver_plugins().driver_origins(), options)


def select_drivers(
    wanted: Sequence[str] | None, options: Options = NO_OPTIONS
) -> list[tuple[DriverInfo, DriverStatus]]:
    """Drivers an engine shall use, highest priority first, with what their probes said.

    With ``wanted`` None: every installed driver (unusable ones are returned with their reason). ``options``
    as for ``probe_drivers``.
    Raises DriverUnavailable when a driver named in ``wanted`` is not installed or not usable.
    """
    installed = {info.name: (origin, info) for origin, info in driver_plugins().driver_origins()}
    for name in wanted or ():
        if name not in installed:
            raise DriverUnavailable(
                f"driver {name!r} is not installed (found: {sorted(installed) or 'none'}); "
                f"try `pip install mooncake-driver-{name}`; `mooncake doctor` shows what failed to load"
            )
    asked_for = [entry for name, entry in installed.items() if wanted is None or name in wanted]
    statuses = _probe(asked_for, options)
    chosen = [(info, status) for (_, info), status in zip(asked_for, statuses, strict=True)]
    for info, status in chosen:
        if wanted is not None and not status.usable:
            raise DriverUnavailable(f"driver {info.name!r} cannot be used here: {status.reason}")
    return chosen
