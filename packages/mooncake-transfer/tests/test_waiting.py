"""Waiting costs nothing, and nobody waits for somebody else's transfer."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from mooncake_transfer import RailConfig, Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import PeerUnreachable, TransferCancelled, TransferTimeout
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import wait_until

KIB = 1 << 10
NBYTES = 256 * KIB
HUNG_S = 1.5  # how long the hung transfer is waited for; what is tested must be over in a fraction of it
SOON_S = 0.5


class Three:
    """An engine with two drivers, a peer that has both, and one whose only device hangs."""

    def __init__(self, stack: ExitStack) -> None:
        self.fabric = stack.enter_context(FakeFabric(drivers={"fast": 60, "plain": 50}))
        options = {"in_flight_ops": 2}
        engine = lambda host, **more: stack.enter_context(  # noqa: E731
            TransferEngine(self.fabric.config(host, options=options, rails=RailConfig(attempts=1), **more))
        )
        self.near: TransferEngine = engine("near")
        self.quick: TransferEngine = engine("quick")
        self.hung: TransferEngine = engine("hung")
        self.local: Region = self.near.allocate(NBYTES)
        self.to_quick = self.reach(self.quick)
        self.to_hung = self.reach(self.hung)
        self.fabric.device("hung", driver="fast").die()
        self.fabric.device("hung", driver="plain").freeze()

    def reach(self, owner: TransferEngine) -> RemoteRegion:
        return self.near.import_region(owner.allocate(NBYTES).descriptor())

    def write(self, remote: RemoteRegion, count: int = 1) -> Transfer:
        rows = [[2 * i * KIB, 2 * i * KIB, KIB] for i in range(count)]
        return self.near.write(self.local, remote, rows)

    @contextmanager
    def somebody_waits(self) -> Iterator[None]:
        """Let a thread wait, and so poll for everybody, for a transfer that hangs."""
        hung = self.write(self.to_hung)

        def wait() -> None:
            with pytest.raises(TransferTimeout):
                hung.wait(HUNG_S)

        thread = threading.Thread(target=wait)
        thread.start()
        yield
        thread.join(HUNG_S + 10)
        assert not thread.is_alive()


@pytest.fixture
def three() -> Iterator[Three]:
    with ExitStack() as stack:
        three = Three(stack)
        yield three
        three.fabric.device("hung", driver="plain").thaw()


def test_waiting_takes_no_processor_time_whatever_other_drivers_did_before(three: Three) -> None:
    for _ in range(3):
        three.write(three.to_quick).wait(10)
    hung = three.write(three.to_hung)
    used_s = time.process_time()
    with pytest.raises(TransferTimeout):
        hung.wait(HUNG_S)
    assert time.process_time() - used_s < HUNG_S / 3


def test_others_transfers_end_while_somebody_waits_for_a_hung_one(three: Three) -> None:
    with three.somebody_waits():
        for _ in range(5):
            begun_s = time.monotonic()
            three.write(three.to_quick).wait(10)
            three.write(three.to_quick, 50).future().result(10)
            assert time.monotonic() - begun_s < SOON_S


def test_a_deadline_is_kept_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        begun_s = time.monotonic()
        late = three.near.write(three.local, three.to_hung, [[0, 0, KIB]], deadline_s=0.05)
        with pytest.raises(TransferTimeout, match="deadline"):
            late.wait(10)
        assert time.monotonic() - begun_s < SOON_S


def test_what_waits_in_the_queue_is_cancelled_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        queued = three.write(three.to_hung, 50)
        begun_s = time.monotonic()
        queued.cancel()
        with pytest.raises(TransferCancelled):
            queued.wait(10)
        assert time.monotonic() - begun_s < SOON_S


def test_a_failure_is_told_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        three.fabric.device("near", driver="fast").fail(next=1, status="unreachable")
        three.fabric.device("near", driver="plain").fail(next=1, status="unreachable")
        begun_s = time.monotonic()
        with pytest.raises(PeerUnreachable):
            three.write(three.to_quick).wait(10)
        assert time.monotonic() - begun_s < SOON_S


def test_a_driver_without_a_descriptor_is_polled_while_somebody_waits_on_another() -> None:
    with ExitStack() as stack:
        fabric = stack.enter_context(FakeFabric(drivers={"mute": 60, "plain": 50}))

        def engine(host: str) -> TransferEngine:
            config = fabric.config(host, rails=RailConfig(attempts=1))
            options = {
                **config.driver_options,
                "mute": {**config.driver_options["mute"], "has_event_fd": False},
            }
            return stack.enter_context(
                TransferEngine(msgspec.structs.replace(config, driver_options=options))
            )

        near, quick, hung = engine("near"), engine("quick"), engine("hung")
        local = near.allocate(NBYTES)
        to_quick, to_hung = (near.import_region(far.allocate(NBYTES).descriptor()) for far in (quick, hung))
        fabric.device("hung", driver="mute").die()
        fabric.device("hung", driver="plain").freeze()
        fabric.device("near", driver="mute").slow(latency_s=0.05)
        stuck = near.write(local, to_hung, [[0, 0, KIB]])

        def wait() -> None:
            with pytest.raises(TransferTimeout):
                stuck.wait(HUNG_S)

        leader = threading.Thread(target=wait)
        leader.start()
        wait_until(lambda: fabric.device("near", driver="plain").counters().in_flight == 1, "it hangs")
        near.write(local, to_quick, [[0, 0, KIB]]).wait(10)  # until the leader sleeps, whatever it did before
        begun_s = time.monotonic()
        near.write(local, to_quick, [[0, 0, KIB]]).wait(10)
        assert time.monotonic() - begun_s < SOON_S
        leader.join(HUNG_S + 10)


def test_an_engine_with_queued_transfers_is_forgotten_once_closed(three: Three) -> None:
    waiting = [three.write(three.to_hung, 50) for _ in range(5)]
    three.near.close()
    wait_until(lambda: all(transfer.done() for transfer in waiting), "closing ends them")
