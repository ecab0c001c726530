"""Test doubles and the suite that every driver has to pass. Needs pytest; never imported by library code.

A driver's whole conformance test is::

    from mooncake_transfer.testing import DriverConformance, Quirks

    class TestMine(DriverConformance):
        driver = "mine"
        quirks = Quirks(same_host_only=True)
"""

import pytest

# Before the modules are imported, so that their failed assertions show values as those of test files do.
pytest.register_assert_rewrite(
    "mooncake_transfer.testing.ending",
    "mooncake_transfer.testing.granting",
    "mooncake_transfer.testing.moving",
    "mooncake_transfer.testing.refusing",
)

from mooncake_transfer.testing.conformance import DriverConformance  # noqa: E402
from mooncake_transfer.testing.fake import FakeFabric  # noqa: E402
from mooncake_transfer.testing.owner import OwnedRegion, RegionOwner, Target  # noqa: E402
from mooncake_transfer.testing.pattern import digest, pattern  # noqa: E402
from mooncake_transfer.testing.peer_process import PeerProcess, PeerProcessError  # noqa: E402
from mooncake_transfer.testing.proxy import FaultProxy, proxied_config  # noqa: E402
from mooncake_transfer.testing.quirks import Quirks  # noqa: E402

__all__ = [
    "DriverConformance",
    "FakeFabric",
    "FaultProxy",
    "OwnedRegion",
    "PeerProcess",
    "PeerProcessError",
    "Quirks",
    "RegionOwner",
    "Target",
    "digest",
    "pattern",
    "proxied_config",
]
