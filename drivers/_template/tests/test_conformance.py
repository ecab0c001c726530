"""The template driver passes the suite of all drivers."""

from __future__ import annotations

from mooncake_transfer.testing import DriverConformance, Quirks


class TestTemplate(DriverConformance):
    driver = "template"
    quirks = Quirks(same_host_only=True)
