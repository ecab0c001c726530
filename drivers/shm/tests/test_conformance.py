"""The shm driver passes the suite of all drivers."""

from __future__ import annotations

from mooncake_transfer.testing import DriverConformance, Quirks


class TestShm(DriverConformance):
    driver = "shm"
    quirks = Quirks(same_host_only=True)
