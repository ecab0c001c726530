"""The suite that every driver passes, over the providers of libfabric that need no hardware."""

from __future__ import annotations

from providers import OVER_SHM, OVER_TCP, needs_libfabric

from mooncake_transfer.testing import DriverConformance, Quirks


@needs_libfabric
class TestOverTcp(DriverConformance):
    driver = "efa"
    driver_options = OVER_TCP
    quirks = Quirks(same_host_only=True)


@needs_libfabric
class TestOverShm(DriverConformance):
    driver = "efa"
    driver_options = OVER_SHM
    quirks = Quirks(same_host_only=True)
