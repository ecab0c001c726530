"""Runs inside the guest, by pytest: the suite that every driver passes, over soft-RoCE."""

from __future__ import annotations

from typing import ClassVar

from mooncake_transfer.testing import DriverConformance, Quirks


class TestVerbsOnRxe(DriverConformance):
    driver = "verbs"
    # Another process takes longer to start here than the suite waits; other hosts have a test of their own.
    quirks = Quirks(same_process_only=True, notices=True)
    driver_options: ClassVar = {"devices": "rxe0", "window_bytes": 1 << 20, "connect_timeout_ms": 60_000}
