"""Finds plugins through entry points, one at a time, so that a broken one never stops the others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

import pluggy

from mooncake_transfer import hooks
from mooncake_transfer.hooks import DriverInfo

__all__ = ["BrokenPlugin", "Plugins", "load_plugins"]

DRIVER_GROUP = "mooncake_transfer.drivers"
CLI_GROUP = "mooncake_transfer.cli"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A plugin that was found and could not be used."""

    name: str
    origin: str
    reason: str


@dataclass(slots=True)
class Plugins:
    """The plugins of one entry-point group: those that work, and why the others do not."""

    manager: pluggy.PluginManager
    broken: list[BrokenPlugin] = field(default_factory=list)

    def drivers(self) -> list[DriverInfo]:
        """Every driver described by a working plugin, highest priority first, then by name."""
        found: dict[str, DriverInfo] = {}
        for plugin_name, info in self._described():
            if info.name in found:
                self._reject(
                    plugin_name, f"offers a second driver named {info.name!r}; the first one is kept"
                )
            else:
                found[info.name] = info
        return sorted(found.values(), key=lambda info: (-info.priority, info.name))

    def _described(self) -> Iterator[tuple[str, DriverInfo]]:
        # Entry-point order is not stable; by name, the outcome of a clash is always the same.
        for name, plugin in sorted(self.manager.list_name_plugin()):
            hook = getattr(plugin, "mooncake_transfer_drivers", None)
            if hook is None:
                continue
            try:
                yield from [(name, _checked(info)) for info in hook()]
            except Exception as error:  # noqa: BLE001 - a third party's code: its failure is reported
                self._reject(name, f"mooncake_transfer_drivers() failed: {_describe(error)}")

    def _reject(self, name: str, reason: str) -> None:
        log.warning("plugin %s: %s", name, reason)
        self.broken.append(BrokenPlugin(name, "hook", reason))


def _checked(info: object) -> DriverInfo:
    if not isinstance(info, DriverInfo):
        raise TypeError(f"expected DriverInfo, got {type(info).__name__}")
    return info


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def load_plugins(group: str) -> Plugins:
    """Import and register every plugin of an entry-point group. Never raises because of one of them."""
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    plugins = Plugins(manager)
    for entry_point in sorted(entry_points(group=group), key=lambda ep: (ep.name, ep.value)):
        _register(plugins, entry_point)
    return plugins


def _register(plugins: Plugins, entry_point: EntryPoint) -> None:
    try:
        if not plugins.manager.has_plugin(entry_point.name):
            plugins.manager.register(entry_point.load(), name=entry_point.name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing any module may raise anything
        reason = _describe(error)
        log.warning("plugin %s (%s) cannot be loaded: %s", entry_point.name, entry_point.value, reason)
        plugins.broken.append(BrokenPlugin(entry_point.name, entry_point.value, reason))


@functools.cache
def driver_plugins() -> Plugins:
    """The driver plugins of this process, loaded when the first engine starts."""
    return load_plugins(DRIVER_GROUP)
