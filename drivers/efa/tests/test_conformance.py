"""The suite that every driver passes, over the providers of libfabric that need no hardware."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fabric_double import config_over_the_double
from providers import IMPATIENT, OVER_SHM, OVER_TCP, needs_libfabric

from mooncake_transfer import TransferConfig
from mooncake_transfer.testing import DriverConformance, PeerProcess, Quirks
from mooncake_transfer.testing.ending import Ends
from mooncake_transfer.testing.fencing import Fences
from mooncake_transfer.testing.granting import Grants
from mooncake_transfer.testing.moving import MovesBytes
from mooncake_transfer.testing.notifying import Notifies
from mooncake_transfer.testing.owner import Target
from mooncake_transfer.testing.refusing import Refuses


class BetweenProcesses:
    """For parts of the suite that are not to be run within one process."""

    @pytest.fixture
    def target(self, standing_peer: PeerProcess | None) -> Iterator[Target]:
        """The other side, in a process of its own."""
        assert standing_peer is not None
        yield standing_peer
        standing_peer.clear()


@needs_libfabric
class TestOverTcp(MovesBytes, Refuses, Fences, Notifies):
    """The suite, but for its parts that wait until a lost peer shows."""

    driver = "efa"
    # So many at once may take long on a busy machine.
    driver_options = OVER_TCP | {"connect_timeout_s": 30.0, "dead_peer_timeout_s": 40.0}
    quirks = Quirks(same_host_only=True, notices=True)
    test_one_engine_serves_sixty_four_peers = Grants.test_one_engine_serves_sixty_four_peers


@needs_libfabric
class TestEndsOverTcp(BetweenProcesses, Grants, Ends):
    """Those parts: peers get less time here. Within one process they are run over the double."""

    driver = "efa"
    driver_options = OVER_TCP | IMPATIENT
    quirks = Quirks(same_host_only=True)
    test_one_engine_serves_sixty_four_peers = None


@needs_libfabric
class TestOverShm(BetweenProcesses, DriverConformance):
    """Between processes: in one, libfabric 1.17 goes on using endpoints of others that have been closed."""

    driver = "efa"
    driver_options = OVER_SHM | IMPATIENT
    quirks = Quirks(same_host_only=True, notices=True)
    # These have several engines in this process.
    test_one_engine_reads_from_many_peers_at_once = None
    test_two_engines_write_to_one_region_at_once = None
    test_one_engine_serves_sixty_four_peers = None
    test_a_peer_that_closes_ends_its_transfers = None
    test_notices_of_many_connections_come_with_their_own_writes = None
    # Of 64 bytes each, of which it moves 1,800 a second.
    test_a_hundred_thousand_small_blocks_arrive = None
    # Half a minute of waiting for the driver's timeouts, which are the same over tcp.
    test_the_death_of_a_peer_ends_its_transfers = None
    test_a_successor_at_the_same_address_is_left_alone = None
    test_a_notice_for_a_peer_that_has_died_fails = None


class TestOverTheDouble(DriverConformance):
    """A libfabric that enforces what efa-direct asks for, and delivers in any order."""

    driver = "efa"
    quirks = Quirks(same_process_only=True, max_slice_bytes=1 << 20, notices=True)

    @classmethod
    def config(cls, **settings: Any) -> TransferConfig:
        return msgspec.structs.replace(config_over_the_double(), **settings)
