"""The driver passes the suite of the transfer engine, where NIXL is installed; then it has to come up too."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from mooncake_driver_nixl.library import MODULES
from mooncake_transfer.testing import DriverConformance, Quirks

INSTALLED = any(find_spec(name) for name in MODULES)


@pytest.mark.skipif(not INSTALLED, reason="NIXL is not installed; `./dev driver.nixl:test` installs it")
class TestNixl(DriverConformance):
    driver = "nixl"
    quirks = Quirks(max_slice_bytes=16 << 20)
