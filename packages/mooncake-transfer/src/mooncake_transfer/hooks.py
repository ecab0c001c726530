"""Hooks a plugin implements: drivers of the transfer engine, and commands of the ``mooncake`` program.

A driver's plugin module, all of it::

    from functools import partial

    from mooncake_transfer.hooks import Available, DriverInfo, Unavailable, hookimpl, lacking, load_core

    PACKAGE = "mooncake_driver_x"                # with _core, whose driver() makes the PyCapsule:
                                                 # see abi/mooncake_driver.h

    def probe() -> Available | Unavailable:
        return lacking(PACKAGE) or Available()

    @hookimpl
    def mooncake_transfer_drivers() -> list[DriverInfo]:
        load = partial(load_core, PACKAGE)       # describing a driver must not need its hardware
        return [DriverInfo("x", frozenset({"dram"}), priority=50, probe=probe, load=load)]
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy
import typer

from mooncake_transfer._errors import ConfigError

__all__ = [
    "Available",
    "DriverInfo",
    "EndpointSpec",
    "RegistryInfo",
    "Unavailable",
    "hookimpl",
    "hookspec",
    "lacking",
    "load_core",
    "load_library",
]

if TYPE_CHECKING:
    from mooncake_transfer.memory import Memory
    from mooncake_transfer.registry.contract import Registry

PROJECT = "mooncake"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class Available:
    """The driver can be used here. ``devices`` names what it found, for people."""

    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The driver cannot be used here. ``reason`` says why and what would help, in one sentence."""

    reason: str


def _no_options(options: Mapping[str, object]) -> Mapping[str, str]:
    if options:
        raise ConfigError(f"this driver takes no options, got {sorted(options)}")
    return {}


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """One endpoint that an engine shall open: usually one for each NIC or address.

    Attributes:
        device: names it for people and in the labels of its rails (``eth0``, ``192.0.2.1``, ``mlx5_0``).
        options: what the driver's core gets, as ``DriverInfo.options`` would render it.
        numa_node: where the device sits, -1 when unknown.
    """

    device: str
    options: Mapping[str, str]
    numa_node: int = -1


@dataclass(frozen=True, slots=True)
class DriverInfo:
    """One driver, described without loading it.

    Attributes:
        name: short and unique; what ``TransferConfig.drivers`` lists.
        kinds: memory kinds it registers: ``dram``, ``cuda``, ``file``, ``block``.
        priority: higher is tried first between two engines that both have the driver (shm 100, tcp 10).
        probe: looks for the hardware and libraries; cheap, never raises. With a parameter named ``options``
            it gets the user's, not checked yet, for those that say where to look; without, it gets nothing.
        load: returns the PyCapsule with the C function table; called once, after a good probe.
        options: checks the user's options (raises ConfigError) and renders them as strings for its core.
        network: it listens on the network: its ``host`` option is the engine's host unless the user sets it.
        trusted_probe: the probe only looks, in files and in this process: it loads no foreign code and cannot
            crash or hang. Others run in a process of their own, with a deadline, which costs a quarter of a
            second when the first engine starts.
        endpoints: turns the user's options (raises ConfigError) into the endpoints to open, one or more, or
            says why there is none to open; None: one, with what ``options`` renders.
        allocate: gives memory of the driver's own, which its peers reach: gets the user's options, the
            region's name and the size; the memory is zeroed and given back with its ``owner``. None: it has
            none, and moves what others allocate.
    """

    name: str
    kinds: frozenset[str]
    priority: int
    probe: Callable[..., Available | Unavailable]
    load: Callable[[], object]
    options: Callable[[Mapping[str, object]], Mapping[str, str]] = _no_options
    network: bool = False
    trusted_probe: bool = False
    endpoints: Callable[[Mapping[str, object]], Sequence[EndpointSpec] | Unavailable] | None = None
    allocate: Callable[[Mapping[str, object], str, int], Memory] | None = None


def load_core(package: str) -> object:
    """Return the capsule with the C functions of a compiled driver, of ``driver()`` in its ``_core``."""
    return importlib.import_module(f"{package}._core").driver()


def lacking(package: str, *, linux: str = "", boot_id: str = "") -> Unavailable | None:
    """Say what a compiled driver lacks on this machine; None: nothing that can be told without its hardware.

    ``linux``: why it runs there only, ``boot_id``: what it reads the kernel's for, each for people; empty: it
    does not need that.
    """
    if linux and sys.platform != "linux":
        return Unavailable(linux)
    if boot_id and not os.access(BOOT_ID, os.R_OK):
        return Unavailable(f"cannot read {BOOT_ID}, {boot_id}; mount /proc")
    if importlib.util.find_spec(f"{package}._core") is None:
        return Unavailable(
            f"the compiled core of {package.replace('_', '-')} is missing; "
            "reinstall it, with a C++20 compiler at hand"
        )
    return None


def load_library(names: Sequence[str], remedy: str) -> ctypes.CDLL | Unavailable:
    """Load the first of these files of a vendor that the loader finds, as a core does."""
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    return Unavailable(f"cannot load {names[0]}: {'; '.join(reasons)}; {remedy}")


@hookspec
def mooncake_transfer_drivers() -> Sequence[DriverInfo]:  # type: ignore[empty-body]
    """Describe the drivers this plugin offers. Called once, when the first engine starts."""


@dataclass(frozen=True, slots=True)
class RegistryInfo:
    """One way to look up engines by name.

    Attributes:
        scheme: what its URLs start with, before the colon.
        open: makes the registry of a URL, without connecting to it yet; gets the URL and the seconds that
            each step of a call may take. Raises ConfigError for a URL that cannot work.
    """

    scheme: str
    open: Callable[[str, float], Registry]


@hookspec
def mooncake_registries() -> Sequence[RegistryInfo]:  # type: ignore[empty-body]
    """Describe the registries this plugin offers. Called when the first engine with a registry starts."""


@hookspec
def mooncake_cli(app: typer.Typer) -> None:
    """Add commands to the ``mooncake`` program. Called once, before its arguments are parsed."""
