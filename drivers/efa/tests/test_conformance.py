"""The suite that every driver passes, over the providers of libfabric that need no hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fabric_double import config_over_the_double
from providers import OVER_SHM, OVER_TCP, needs_libfabric

from mooncake_transfer import TransferConfig
from mooncake_transfer.testing import DriverConformance, PeerProcess, Quirks
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.refusing import Refuses


@needs_libfabric
class TestOverTcp(MovesBytes, Refuses):
    """What libfabric's own providers take long for, lost peers above all, is tested over the double."""

    driver = "efa"
    driver_options = OVER_TCP
    quirks = Quirks(same_host_only=True)


@needs_libfabric
class TestOverShm(MovesBytes, Refuses):
    """Between processes: in one, libfabric 1.17 reads messages of endpoints that have been closed."""

    driver = "efa"
    driver_options = OVER_SHM
    quirks = Quirks(same_host_only=True)
    # These have several engines in this process.
    test_one_engine_reads_from_many_peers_at_once = None
    test_two_engines_write_to_one_region_at_once = None

    @pytest.fixture
    def target(self, standing_peer: PeerProcess | None) -> Iterator[Target]:
        """The other side, in a process of its own."""
        assert standing_peer is not None
        yield standing_peer
        standing_peer.clear()


class TestOverTheDouble(DriverConformance):
    """A libfabric that enforces what efa-direct asks for, and delivers in any order."""

    driver = "efa"
    quirks = Quirks(same_process_only=True, max_slice_bytes=1 << 20)

    @classmethod
    def config(cls, **settings: Any) -> TransferConfig:
        return msgspec.structs.replace(config_over_the_double(), **settings)
