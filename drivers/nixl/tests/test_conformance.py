"""The driver passes the suite of the transfer engine, where NIXL is installed."""

from __future__ import annotations

import pytest

from mooncake_driver_nixl import plugin
from mooncake_transfer.hooks import Unavailable
from mooncake_transfer.testing import DriverConformance, Quirks

FOUND = plugin.probe()


@pytest.mark.skipif(isinstance(FOUND, Unavailable), reason=getattr(FOUND, "reason", ""))
class TestNixl(DriverConformance):
    driver = "nixl"
    quirks = Quirks(max_slice_bytes=16 << 20)
