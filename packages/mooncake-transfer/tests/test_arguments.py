"""Arguments that cannot work are refused as such, with what they must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mooncake_transfer import (
    GridSide,
    RailConfig,
    Transfer,
    TransferConfig,
    TransferEngine,
    TransferState,
)
from mooncake_transfer.errors import ConfigError, RegionRefused, TransferCancelled, TransferTimeout
from mooncake_transfer.testing.fake import FakeDevice, FakeFabric

NAN = float("nan")
DEADLINE_S = 10.0


class Pair:
    """A transfer that is ready to be posted over a fake device."""

    def __init__(self, device: FakeDevice, near: TransferEngine, far: TransferEngine) -> None:
        self.device, self.near, self.far = device, near, far
        self.local, self.owned = near.allocate(4096), far.allocate(4096)
        self.remote = near.import_region(self.owned.descriptor())

    def prepared(self) -> Transfer:
        return self.near.prepare_write(self.local, self.remote, [[0, 0, 4096]])


@pytest.fixture
def pair() -> Iterator[Pair]:
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("near")) as near,
        TransferEngine(fabric.config("far")) as far,
    ):
        yield Pair(fabric.device("near"), near, far)


@pytest.mark.parametrize("name", ["x" * 256, "漢" * 86])
def test_a_name_of_a_region_has_at_most_255_bytes(pair: Pair, name: str) -> None:
    for take in (
        lambda: pair.near.allocate(4096, name=name),
        lambda: pair.near.register(bytearray(4096), name=name),
        lambda: pair.near.register_many([bytearray(4096)], names=[name]),
    ):
        with pytest.raises(ConfigError, match=r"name is '.*at most 255 bytes long; it has 25[68]"):
            take()
    assert pair.near.register(bytearray(4096), name="漢" * 85).name == "漢" * 85


@pytest.mark.parametrize("address", ["127.0.0.1:٣", "127.0.0.1:３"])
def test_a_port_is_written_in_digits_that_everybody_reads(pair: Pair, address: str) -> None:
    with pytest.raises(ConfigError, match="is not host:port"):
        pair.near.connect(address)


TAKERS: dict[str, Callable[[Pair, Any], object]] = {
    "connect": lambda p, s: p.near.connect(p.far.address, timeout_s=s),
    "call": lambda p, s: p.near.connect(p.far.address).call("method", timeout_s=s),
    "notify": lambda p, s: p.near.connect(p.far.address).notify("method", timeout_s=s),
    "import_region": lambda p, s: p.near.import_region(p.owned.descriptor(), timeout_s=s),
    "close": lambda p, s: p.local.close(s),
    "wait": lambda p, s: p.prepared().post().wait(s),
    "deadline_s": lambda p, s: p.prepared().post(deadline_s=s),
}


@pytest.mark.parametrize("given", [NAN, -1, "soon"], ids=str)
@pytest.mark.parametrize("taker", TAKERS)
def test_a_time_that_is_none_is_refused(pair: Pair, taker: str, given: object) -> None:
    with pytest.raises(ConfigError, match="must be a number of seconds, 0 or more"):
        TAKERS[taker](pair, given)


@pytest.mark.parametrize("given", ["x", ("method",), ("method", "text"), (1, b"bytes")], ids=repr)
def test_a_notification_that_is_none_is_refused(pair: Pair, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"notify is .*must be a pair"):
        pair.prepared().post(notify=given)


def test_a_grid_with_a_fraction_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stride of the grid is 0\.5; it must be an integer"):
        GridSide(index=[0], stride=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [NAN, float("inf"), -1.0], ids=str)
def test_a_rail_setting_that_is_no_number_is_refused(given: float) -> None:
    with pytest.raises(ConfigError, match=r"rails\.aging_s"):
        RailConfig(aging_s=given)


def test_a_row_beyond_every_region_is_taken_for_what_it_is(pair: Pair) -> None:
    with pytest.raises(RegionRefused, match="outside"):
        pair.near.write(pair.local, pair.remote, [[2**63, 0, 1]])
    for beyond in (2**64, -(2**70)):
        with pytest.raises(ConfigError, match=f"blocks holds {beyond}; it must be from 0"):
            pair.near.write(pair.local, pair.remote, [[beyond, 0, 1]])
    for rows in ([[0.5, 0, 1]], [[True, False, True]]):
        with pytest.raises(ConfigError, match="blocks must be an N x 3 integer array"):
            pair.near.write(pair.local, pair.remote, rows)


def test_a_mistyped_driver_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'tpc'.*did you mean 'tcp'\?"):
        TransferEngine(TransferConfig(driver_options={"tpc": {}}))


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(ConfigError, match="no interface of this machine has that address"):
        TransferEngine(TransferConfig(host="192.0.2.1"))


def test_what_is_wrong_with_an_unnamed_region_is_said_of_its_number(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"region 'region-\d+'"):
        pair.near.allocate(0)


def test_the_own_key_of_a_region_is_not_revoked(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"own key of region .*close\(\).*grant\(\)"):
        pair.owned.revoke(pair.owned.descriptor())


def test_a_state_says_how_a_transfer_failed(pair: Pair) -> None:
    pair.device.freeze()
    cancelled, late = pair.prepared().post(), pair.prepared().post(deadline_s=0.05)
    cancelled.cancel()
    with pytest.raises(TransferCancelled):
        cancelled.wait(DEADLINE_S)
    with pytest.raises(TransferTimeout):
        late.wait(DEADLINE_S)
    assert cancelled.status().state is TransferState.CANCELLED
    assert late.status().state is TransferState.TIMED_OUT
