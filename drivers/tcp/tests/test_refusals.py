"""What an initiator remembers of a refusal: what stays, and not what one spoilt request brought about."""

from __future__ import annotations

import pytest

from mooncake_transfer import TransferConfig, TransferEngine
from mooncake_transfer.errors import RegionRefused
from mooncake_transfer.testing.proxy import FaultProxy, proxied_config

NBYTES = 4096
DEADLINE_S = 10.0
BLOCK = [[0, 0, NBYTES]]


def test_a_region_works_again_after_a_request_whose_key_was_spoilt() -> None:
    with (
        FaultProxy() as channel,
        FaultProxy() as data,
        TransferEngine(proxied_config(channel, data)) as owner,
        TransferEngine(TransferConfig(drivers=("tcp",))) as reader,
    ):
        local, remote = reader.allocate(NBYTES), reader.import_region(owner.allocate(NBYTES).descriptor())
        reader.read(local, remote, BLOCK).wait(DEADLINE_S)
        data.corrupt()  # the middle of what passes next: the key in the header of a request
        with pytest.raises(RegionRefused, match="access key is wrong"):
            reader.read(local, remote, BLOCK).wait(DEADLINE_S)
        reader.read(local, remote, BLOCK).wait(DEADLINE_S)


def test_a_revoked_key_stays_refused_and_is_not_asked_for_again() -> None:
    config = TransferConfig(drivers=("tcp",))
    with TransferEngine(config) as owner, TransferEngine(config) as reader:
        owned, local = owner.allocate(NBYTES), reader.allocate(NBYTES)
        descriptor = owned.descriptor("r")
        remote = reader.import_region(descriptor)
        reader.read(local, remote, BLOCK).wait(DEADLINE_S)
        owned.revoke(descriptor)
        for _ in range(3):
            with pytest.raises(RegionRefused, match="revoked"):
                reader.read(local, remote, BLOCK).wait(DEADLINE_S)
        assert owner.stats()["tcp"]["refused"] == 1
