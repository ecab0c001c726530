"""Runs inside the guest, by pytest: the suite that every driver passes, over libfabric's verbs;ofi_rxm."""

from __future__ import annotations

from typing import ClassVar

from mooncake_transfer import TransferEngine
from mooncake_transfer.testing import DriverConformance, Quirks, ending, peer_process

DOMAIN = "rxe0"
# Time is no evidence in an emulated guest.
OPTIONS: dict[str, str | int | float | bool] = {
    "provider": "verbs;ofi_rxm",
    "domain": DOMAIN,
    "endpoints": 8,
    "connect_timeout_s": 60.0,
    "dead_peer_timeout_s": 60.0,
}
# Where the guest is emulated, another process reads every file of Python over 9p.
peer_process.START_S = 400.0
ending.PEER_LOSS_S = 120.0


class TestEfaOnRxe(DriverConformance):
    driver = "efa"
    quirks = Quirks(notices=True)
    # A peer that dies shows within these; the driver's usual ones are too short for an emulated guest.
    driver_options: ClassVar = OPTIONS | {"connect_timeout_s": 20.0, "dead_peer_timeout_s": 20.0}

    @classmethod
    def setup_class(cls) -> None:
        """Open and close an engine first: libfabric keeps the devices open from its first one on."""
        TransferEngine(cls.config()).close()
        super().setup_class()
