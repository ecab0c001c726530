"""A region that peers still use when the time to give it back is over: the error says who they are."""

from __future__ import annotations

import pytest
from fabric_double import config_over_the_double

from mooncake_transfer import TransferEngine
from mooncake_transfer.errors import RegionBusy

DEADLINE_S = 20.0
NBYTES = 1 << 16


def test_who_has_not_let_go_is_named_by_its_address() -> None:
    config = config_over_the_double()
    with TransferEngine(config) as owner, TransferEngine(config) as user:
        region, local = owner.allocate(NBYTES), user.allocate(NBYTES)
        user.read(local, user.import_region(region.descriptor()), [[0, 0, NBYTES]]).wait(DEADLINE_S)
        with pytest.raises(RegionBusy, match=r"1 sessions of peers, such as that of double://\d+, have not"):
            region.close(0)  # before the peer can answer that it is done
        region.close(DEADLINE_S)
