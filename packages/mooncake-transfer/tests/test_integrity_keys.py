"""Who is told checksums: those who may read the region, for as long as they may."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import xxhash

from mooncake_transfer import Region, RemoteRegion, TransferEngine, _wire
from mooncake_transfer.errors import ConfigError, RegionBusy, RemoteError
from mooncake_transfer.peer import CHECKSUM_METHOD
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

NBYTES = 1 << 16
ROWS = [[0, 0, NBYTES]]
DEADLINE_S = 20.0


class Pair:
    """An engine that owns a region, and one that asks for checksums by hand."""

    def __init__(self, stack: ExitStack) -> None:
        fabric = stack.enter_context(FakeFabric())
        self.near = stack.enter_context(TransferEngine(fabric.config("near")))
        self.strict = stack.enter_context(TransferEngine(fabric.config("strict", integrity="full")))
        self.far = stack.enter_context(TransferEngine(fabric.config("far")))
        self.local: Region = self.near.allocate(NBYTES)
        self.owned: Region = self.far.allocate(NBYTES)
        self.device = fabric.device("far")
        stack.callback(self.device.release)
        bytes_of(self.owned)[:] = 7

    def checksums(self, remote: RemoteRegion, *ranges: tuple[int, int]) -> list[int]:
        query = _wire.ChecksumQuery(remote._id, remote._key, list(ranges))
        answer = remote.peer.call(CHECKSUM_METHOD, msgspec.msgpack.encode(query))
        return msgspec.msgpack.decode(answer, type=list[int])

    def assert_told(self, remote: RemoteRegion) -> None:
        assert self.checksums(remote, (0, 1)) == [xxhash.xxh3_64_intdigest(b"\x07")]

    def assert_refused(self, remote: RemoteRegion) -> None:
        for nbytes in (0, 1, NBYTES):
            with pytest.raises(RemoteError) as refused:
                self.checksums(remote, (0, nbytes))
            assert refused.value.kind == "RegionRefused"

    def hold(self, remote: RemoteRegion) -> None:
        """Keep an operation of the peer in the owned region."""
        self.device.hold()
        self.near.read(self.local, remote, ROWS)
        wait_until(lambda: self.device.held() > 0, "the operation is held")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.mark.parametrize("access", ["r", "rw"])
def test_a_key_that_may_read_is_told(pair: Pair, access: str) -> None:
    pair.assert_told(pair.near.import_region(pair.owned.descriptor(access)))  # type: ignore[arg-type]
    pair.assert_told(pair.near.import_region(pair.owned.grant(access)))  # type: ignore[arg-type]


def test_a_key_that_may_only_write_is_told_nothing(pair: Pair) -> None:
    pair.assert_refused(pair.near.import_region(pair.owned.descriptor("w")))


def test_a_write_with_such_a_key_is_verified_never_and_says_so_before_anything_moves(pair: Pair) -> None:
    remote = pair.near.import_region(pair.owned.descriptor("w"))
    transfer = pair.near.prepare_write(pair.local, remote, ROWS)
    with pytest.raises(ConfigError, match=r"cannot be verified.*'w'.*'rw'.*verify=False"):
        transfer.post(verify=True)
    assert transfer.state == "prepared"
    assert set(bytes_of(pair.owned)) == {7}
    transfer.post(verify=False).wait(DEADLINE_S)
    assert set(bytes_of(pair.owned)) == {0}


def test_an_engine_that_verifies_everything_refuses_it_too(pair: Pair) -> None:
    local = pair.strict.allocate(NBYTES)
    remote = pair.strict.import_region(pair.owned.descriptor("w"))
    with pytest.raises(ConfigError, match="verify=False"):
        pair.strict.write(local, remote, ROWS)
    pair.strict.write(local, remote, ROWS, verify=False).wait(DEADLINE_S)


def test_a_read_with_a_key_that_may_only_read_is_verified(pair: Pair) -> None:
    remote = pair.near.import_region(pair.owned.descriptor("r"))
    pair.near.read(pair.local, remote, ROWS, verify=True).wait(DEADLINE_S)
    assert set(bytes_of(pair.local)) == {7}


def test_a_revoked_key_is_told_nothing_even_when_the_region_is_still_busy(pair: Pair) -> None:
    lent = pair.owned.grant("rw")
    remote = pair.near.import_region(lent)
    pair.assert_told(remote)
    pair.hold(remote)
    with pytest.raises(RegionBusy):
        pair.owned.revoke(lent, 0.05)
    pair.assert_refused(remote)
    with pytest.raises(RegionBusy):
        pair.owned.revoke(lent, 0.05)  # it may be asked again, for when nobody uses it any more
    pair.device.release()
    pair.owned.revoke(lent, DEADLINE_S)
    pair.assert_refused(remote)
    with pytest.raises(ConfigError, match="revoked already"):
        pair.owned.revoke(lent)


def test_a_region_whose_close_waits_tells_nothing(pair: Pair) -> None:
    remote = pair.near.import_region(pair.owned.descriptor())
    pair.assert_told(remote)
    pair.hold(remote)
    with pytest.raises(RegionBusy):
        pair.owned.close(0.05)
    pair.assert_refused(remote)
    pair.device.release()
    pair.owned.close(DEADLINE_S)
    pair.assert_refused(remote)


def test_a_range_outside_the_region_is_refused(pair: Pair) -> None:
    remote = pair.near.import_region(pair.owned.descriptor())
    for found in ((NBYTES, 1), (-1, 1), (0, NBYTES + 1), (1, -1)):
        with pytest.raises(RemoteError, match="outside region"):
            pair.checksums(remote, found)
