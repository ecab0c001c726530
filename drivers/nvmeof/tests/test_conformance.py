"""The nvmeof driver passes the suite of all drivers, by each way in which it reads and writes files."""

from __future__ import annotations

from typing import ClassVar

from mooncake_transfer.testing import DriverConformance, Quirks
from mooncake_transfer.testing.ending import Ends
from mooncake_transfer.testing.moving import MovesBytes

MIB = 1 << 20
QUIRKS = Quirks(same_host_only=True, max_slice_bytes=MIB, target_kind="file")


class TestIoUring(DriverConformance):
    driver = "nvmeof"
    quirks = QUIRKS
    driver_options: ClassVar = {"io": "io_uring"}


class TestThreads(MovesBytes, Ends):  # keys do not depend on who does the I/O
    driver = "nvmeof"
    quirks = QUIRKS
    driver_options: ClassVar = {"io": "threads"}
