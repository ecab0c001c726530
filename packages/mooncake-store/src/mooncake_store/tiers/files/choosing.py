"""Which way files are read and written on this machine."""

from __future__ import annotations

import logging

from mooncake_store._errors import ConfigError
from mooncake_store.tiers.files.access import Files
from mooncake_store.tiers.files.driver import DRIVER, DriverFiles
from mooncake_store.tiers.files.threads import ThreadFiles
from mooncake_transfer.errors import TransferError

__all__ = ["open_files"]

WAYS = ("auto", "driver", "threads")

log = logging.getLogger(__name__)


def open_files(way: str, *, direct: bool, in_flight: int) -> Files:
    """``driver``, ``threads``, or ``auto``: the driver where it works. Raises ConfigError."""
    if way not in WAYS:
        raise ConfigError(f"io is {way!r}; it must be one of {', '.join(WAYS)}")
    if way != "threads":
        try:
            return DriverFiles(direct=direct, in_flight=in_flight)
        except TransferError as error:
            if way == "driver":
                raise ConfigError(
                    f"files cannot be reached by the {DRIVER} driver: {error}; "
                    f"pip install mooncake-driver-{DRIVER}, or io='threads'"
                ) from error
            log.info("files are read by threads, the %s driver does not work here: %s", DRIVER, error)
    return ThreadFiles(min(in_flight, 32), direct=direct)
