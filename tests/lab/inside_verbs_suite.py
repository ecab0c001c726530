"""Runs inside the guest, by pytest: the suite that every driver passes, over soft-RoCE."""

from __future__ import annotations

from typing import ClassVar

from mooncake_transfer.testing import DriverConformance, Quirks, peer_process

# Where the guest is emulated, another process reads every file of Python over 9p.
peer_process.START_S = 400.0


class TestVerbsOnRxe(DriverConformance):
    driver = "verbs"
    quirks = Quirks(notices=True)
    driver_options: ClassVar = {"devices": "rxe0", "window_bytes": 1 << 20, "connect_timeout_ms": 60_000}
