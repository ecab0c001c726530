"""Which drivers may carry a transfer: for one post, or for all of an engine while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from mooncake_transfer import RailConfig, Transfer, TransferConfig, TransferEngine
from mooncake_transfer.errors import ConfigError, DriverUnavailable, NoRoute, PeerUnreachable
from mooncake_transfer.hooks import EndpointSpec
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import wait_until

MIB = 1 << 20
DEADLINE_S = 20.0


class Pair:
    """Two engines with a fast and a plain driver."""

    def __init__(self, stack: ExitStack) -> None:
        self.fabric = stack.enter_context(FakeFabric(drivers={"fast": 60, "plain": 50}))
        rails = RailConfig(slice_bytes=64 << 10, attempts=3)
        self.near = stack.enter_context(
            TransferEngine(self.fabric.config("near", rails=rails, options={"in_flight_bytes": 128 << 10}))
        )
        self.far = stack.enter_context(TransferEngine(self.fabric.config("far")))
        self.local = self.near.allocate(MIB)
        self.remote = self.near.import_region(self.far.allocate(MIB).descriptor())

    def prepared(self) -> Transfer:
        return self.near.prepare_write(self.local, self.remote, [[0, 0, MIB]])

    def used(self, transfer: Transfer) -> set[str]:
        transfer.wait(DEADLINE_S)
        return set(transfer.bytes_by_driver)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_a_post_takes_only_the_drivers_it_names(pair: Pair) -> None:
    transfer = pair.prepared()
    assert pair.used(transfer.post(drivers=["plain"])) == {"plain"}
    assert pair.used(transfer.post(drivers=("plain", "fast"))) == {"fast"}
    assert pair.used(transfer.post()) == {"fast"}
    with pytest.raises(NoRoute, match=r"drivers tcp, of which none leads there; those that do: fast, plain"):
        transfer.post(drivers=["tcp"])
    assert pair.used(transfer.post()) == {"fast"}


def test_a_post_does_not_fall_back_to_drivers_it_does_not_name(pair: Pair) -> None:
    pair.fabric.device("near", driver="fast").die()
    with pytest.raises(PeerUnreachable, match="fast"):
        pair.prepared().post(drivers=["fast"], attempts=1).wait(DEADLINE_S)
    assert pair.used(pair.prepared().post()) == {"plain"}


def test_what_differs_moves_again_over_the_drivers_of_its_post(pair: Pair) -> None:
    pair.local.view()[:8] = b"expected"
    pair.fabric.device("near", driver="plain").corrupt(next=1)
    fast = pair.fabric.device("near", driver="fast")
    pair.prepared().post(drivers=["plain"], verify=True).wait(DEADLINE_S)
    assert pair.fabric.device("near", driver="plain").counters().bytes_written > MIB, "a range moved again"
    assert fast.counters().operations == 0


@pytest.mark.parametrize("attempts", [1, 2, 4])
def test_a_post_has_as_many_attempts_as_it_says(pair: Pair, attempts: int) -> None:
    device = pair.fabric.device("near", driver="fast")
    device.die()
    small = pair.near.prepare_write(pair.local, pair.remote, [[0, 0, 8]])
    with pytest.raises(PeerUnreachable):
        small.post(drivers=["fast"], attempts=attempts).wait(DEADLINE_S)
    (rail,) = (rail for rail in pair.near.rails() if rail.driver == "fast")
    assert rail.errors == attempts


def test_a_disabled_driver_carries_nothing_until_it_is_enabled_again(pair: Pair) -> None:
    transfer = pair.prepared()
    pair.near.disable_driver("fast")
    assert pair.used(transfer.post()) == {"plain"}
    pair.near.disable_driver("plain")
    with pytest.raises(NoRoute, match=r"every driver that leads there is disabled \(fast, plain\)"):
        transfer.post()
    pair.near.enable_driver("fast")
    assert pair.used(transfer.post()) == {"fast"}
    with pytest.raises(ConfigError, match=r"driver 'tcp' is not open in this engine \(open: fast, plain\)"):
        pair.near.disable_driver("tcp")


def test_a_running_transfer_goes_on_over_other_drivers_when_its_own_is_disabled(pair: Pair) -> None:
    fast = pair.fabric.device("near", driver="fast")
    fast.slow(bandwidth=2e6)
    transfer = pair.prepared().post()
    wait_until(lambda: fast.counters().completed > 0, "the fast driver has begun")
    pair.near.disable_driver("fast")
    fast.slow(bandwidth=0)
    assert pair.used(transfer) == {"fast", "plain"}


def test_a_waiting_transfer_fails_with_the_reason_when_every_driver_is_disabled(pair: Pair) -> None:
    fast = pair.fabric.device("near", driver="fast")
    fast.freeze()
    blocks = [[2 * i, 2 * i, 1] for i in range(10_000)]  # more than a driver holds at once
    transfer = pair.near.write(pair.local, pair.remote, blocks, drivers=["fast"])
    pair.near.disable_driver("fast")
    fast.thaw()
    with pytest.raises(NoRoute, match="fast is disabled"):
        transfer.wait(DEADLINE_S)


@pytest.mark.parametrize("option", ["host", "hosts"])
def test_a_driver_with_options_that_does_not_start_is_not_left_out(option: str) -> None:
    config = TransferConfig(driver_options={"tcp": {option: "192.0.2.1"}})
    with pytest.raises(DriverUnavailable, match=r"driver 'tcp' does not start.*192\.0\.2\.1"):
        TransferEngine(config)


def test_one_endpoint_of_several_that_does_not_start_is_told_and_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with TransferEngine(TransferConfig(driver_options={"tcp": {"hosts": "127.0.0.1,192.0.2.1"}})) as engine:
        assert engine.drivers["tcp"].usable
    assert "driver tcp does not start on 192.0.2.1" in caplog.text
    named = TransferConfig(drivers=("tcp",), driver_options={"tcp": {"hosts": "127.0.0.1,192.0.2.1"}})
    with pytest.raises(DriverUnavailable, match=r"driver 'tcp' does not start.*192\.0\.2\.1"):
        TransferEngine(named)


def test_a_driver_whose_plugin_fails_to_list_its_endpoints_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeFabric(drivers={"broken": 60, "plain": 50}) as fabric:
        real = fabric._endpoints

        def endpoints(driver: str, options: Any) -> list[EndpointSpec]:
            if driver == "broken":
                raise OSError("on purpose")
            return real(driver, options)

        monkeypatch.setattr(fabric, "_endpoints", endpoints)
        with TransferEngine() as engine:
            assert engine.drivers["plain"].usable
            assert not engine.drivers["broken"].usable
            assert engine.drivers["broken"].reason == "it does not start: on purpose"
        assert "driver broken does not start: on purpose" in caplog.text
        for config in (
            TransferConfig(drivers=("broken", "plain")),
            TransferConfig(driver_options={"broken": {"devices": 2}}),
        ):
            with pytest.raises(DriverUnavailable, match=r"driver 'broken' does not start.*on purpose"):
                TransferEngine(config)


def test_memory_of_a_driver_that_has_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="driver 'zz' has no memory of its own"):
        TransferEngine(TransferConfig(allocate_from="zz"))
