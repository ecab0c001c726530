"""The suite that every driver passes."""

from mooncake_transfer.testing import DriverConformance, Quirks


class TestTcp(DriverConformance):
    driver = "tcp"
    quirks = Quirks()
