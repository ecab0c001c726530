"""Finds plugins through entry points, one at a time, so that a broken one never stops the others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

import pluggy

from mooncake_transfer import hooks
from mooncake_transfer.hooks import DriverInfo, RegistryInfo

__all__ = ["BrokenPlugin", "Plugins", "load_plugins"]

DRIVER_GROUP = "mooncake_transfer.drivers"
CLI_GROUP = "mooncake_transfer.cli"
REGISTRY_GROUP = "mooncake_transfer.registries"

Info = TypeVar("Info")

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
    values: dict[str, str] = field(default_factory=dict)  # "module:attribute" of each from an entry point

    def drivers(self) -> list[DriverInfo]:
        """Every driver described by a working plugin, highest priority first, then by name."""
        return [info for _, info in self.driver_origins()]

    def driver_origins(self) -> list[tuple[str | None, DriverInfo]]:
        """The same, each with the value of its entry point, by which another process can import it too.

        None where the plugin was registered by this process and not by an entry point.
        """
        found = self.offered("driver", "mooncake_transfer_drivers", DriverInfo, lambda info: info.name)
        found.sort(key=lambda entry: (-entry[1].priority, entry[1].name))
        return [(self.values.get(plugin), info) for plugin, info in found]

    def registries(self) -> list[RegistryInfo]:
        """Every registry described by a working plugin; the first plugin by name has a scheme."""
        found = self.offered("registry", "mooncake_registries", RegistryInfo, lambda info: info.scheme)
        return [info for _, info in found]

    def offered(
        self, what: str, hook: str, kind: type[Info], name_of: Callable[[Info], str]
    ) -> list[tuple[str, Info]]:
        """What the working plugins return from a hook, each with its plugin's name; of two with one name the
        first is kept. ``what`` names the kind for people.
        """
        found: dict[str, tuple[str, Info]] = {}
        for plugin_name, info in self._described(hook, kind):
            if name_of(info) in found:
                self._reject(
                    plugin_name, f"offers a second {what} named {name_of(info)!r}; the first one is kept"
                )
            else:
                found[name_of(info)] = (plugin_name, info)
        return list(found.values())

    def _described(self, hook_name: str, kind: type[Info]) -> Iterator[tuple[str, Info]]:
        # Entry-point order is not stable; by name, the outcome of a clash is always the same.
        for name, plugin in sorted(self.manager.list_name_plugin()):
            hook = getattr(plugin, hook_name, None)
            if hook is None:
                continue
            try:
                yield from [(name, _checked(info, kind)) for info in hook()]
            except Exception as error:  # noqa: BLE001 - a third party's code: its failure is reported
                self._reject(name, f"{hook_name}() failed: {_describe(error)}")

    def _reject(self, name: str, reason: str) -> None:
        log.warning("plugin %s: %s", name, reason)
        self.broken.append(BrokenPlugin(name, "hook", reason))


def _checked(info: object, kind: type[Info]) -> Info:
    if not isinstance(info, kind):
        raise TypeError(f"expected {kind.__name__}, got {type(info).__name__}")
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
            plugins.values[entry_point.name] = entry_point.value
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing any module may raise anything
        reason = _describe(error)
        log.warning("plugin %s (%s) cannot be loaded: %s", entry_point.name, entry_point.value, reason)
        plugins.broken.append(BrokenPlugin(entry_point.name, entry_point.value, reason))


@functools.cache
def driver_plugins() -> Plugins:
    """The driver plugins of this process, loaded when the first engine starts."""
    return load_plugins(DRIVER_GROUP)
