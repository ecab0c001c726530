"""The nvmeof driver passes the suite of all drivers, by each way in which it reads and writes files."""

from __future__ import annotations

from mooncake_transfer.testing import DriverConformance, Quirks

MIB = 1 << 20


class TestIoUring(DriverConformance):
    driver = "nvmeof"
    quirks = Quirks(same_host_only=True, same_process_only=True, max_slice_bytes=MIB, target_kind="file")
    driver_options = {"io": "io_uring"}  # noqa: RUF012 - as the suite has it


class TestThreads(TestIoUring):
    driver_options = {"io": "threads"}  # noqa: RUF012
