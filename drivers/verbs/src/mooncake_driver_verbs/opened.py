"""What libibverbs says of the devices when they are opened: asked through pyverbs, where that is installed.

sysfs shows what the kernel has. It does not show that the library lacks the provider of a device, or that
this process may not open it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["Opened", "is_installed", "open_devices"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A device that can be opened.

    Attributes:
        firmware: its version, as the device writes it; empty where it has none.
        mtus: largest packet of each port in bytes, by the port's number.
    """

    firmware: str
    mtus: dict[int, int]

    def describe(self, port: int) -> str:
        """Words to follow those of sysfs on a port."""
        words = [f"MTU {self.mtus[port]}"] if port in self.mtus else []
        words += [f"firmware {self.firmware}"] if self.firmware else []
        return "".join(f", {word}" for word in words)


def is_installed() -> bool:
    """Whether there is a pyverbs to ask. Loads nothing."""
    return importlib.util.find_spec("pyverbs") is not None


def open_devices() -> dict[str, Opened | str] | None:
    """Open each device that libibverbs lists and close it again: what it says, or why it cannot be opened.

    None where pyverbs is not installed, or does not fit the machine's libibverbs. Loads foreign code.
    """
    if not is_installed():
        return None
    try:
        device = importlib.import_module("pyverbs.device")
        error = importlib.import_module("pyverbs.pyverbs_error").PyverbsError
    except ImportError as reason:
        log.warning("pyverbs is installed and cannot be imported: %s", reason)
        return None
    with suppress(error):  # so it says that there is none
        names = [listed.name for listed in device.get_device_list()]
        return {name.decode(): _open(device, name.decode(), error) for name in names}
    return {}


def _open(pyverbs: Any, name: str, error: type[Exception]) -> Opened | str:
    try:
        with pyverbs.Context(name=name) as context:
            limits = context.query_device()
            ports = range(1, limits.phys_port_cnt + 1)
            mtus = {port: 128 << context.query_port(port).active_mtu for port in ports}
            return Opened(_text(limits.fw_version), mtus)
    except error as reason:
        return str(reason)


def _text(value: str | bytes) -> str:
    return (value.decode() if isinstance(value, bytes) else value).strip()
