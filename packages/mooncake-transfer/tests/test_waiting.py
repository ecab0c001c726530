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

KIB, MIB = 1 << 10, 1 << 20
NBYTES = 256 * KIB
IDLE_S = 1.5
HUNG_S = (
    60.0  # how long a hung transfer is waited for; what is tested ends before, within the 10 s it is given
)


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
            with pytest.raises(TransferCancelled):
                hung.wait(HUNG_S)

        thread = threading.Thread(target=wait)
        thread.start()
        try:
            yield
            assert thread.is_alive()
        finally:
            hung.cancel()
            thread.join(10)
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
        hung.wait(IDLE_S)
    assert time.process_time() - used_s < IDLE_S / 3


def test_a_thread_that_keeps_waiting_for_slow_transfers_polls_for_few_of_them() -> None:
    nbytes = MIB  # worth 50 us of polling, and 4 bytes more each ns
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("near")) as near,
        TransferEngine(fabric.config("far")) as far,
    ):
        local, remote = near.allocate(nbytes), near.import_region(far.allocate(nbytes).descriptor())
        fabric.device("near").slow(latency_s=0.003)
        transfer = near.prepare_write(local, remote, [[0, 0, nbytes]])
        used = []
        for _ in range(100):
            begun_s = time.thread_time()
            transfer.post().wait(10)
            used.append(time.thread_time() - begun_s)
    assert sorted(used)[50] < 200e-6, "polling alone takes over 300 us"


def test_others_transfers_end_while_somebody_waits_for_a_hung_one(three: Three) -> None:
    with three.somebody_waits():
        for _ in range(5):
            three.write(three.to_quick).wait(10)
            three.write(three.to_quick, 50).future().result(10)


def test_a_deadline_is_kept_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        late = three.near.write(three.local, three.to_hung, [[0, 0, KIB]], deadline_s=0.05)
        with pytest.raises(TransferTimeout, match="deadline"):
            late.wait(10)


def test_what_waits_in_the_queue_is_cancelled_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        queued = three.write(three.to_hung, 50)
        queued.cancel()
        with pytest.raises(TransferCancelled):
            queued.wait(10)


def test_a_failure_is_told_while_somebody_waits(three: Three) -> None:
    with three.somebody_waits():
        three.fabric.device("near", driver="fast").fail(next=1, status="unreachable")
        three.fabric.device("near", driver="plain").fail(next=1, status="unreachable")
        with pytest.raises(PeerUnreachable):
            three.write(three.to_quick).wait(10)


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
            with pytest.raises(TransferCancelled):
                stuck.wait(HUNG_S)

        leader = threading.Thread(target=wait)
        leader.start()
        wait_until(lambda: fabric.device("near", driver="plain").counters().in_flight == 1, "it hangs")
        near.write(local, to_quick, [[0, 0, KIB]]).wait(10)  # until the leader sleeps, whatever it did before
        near.write(local, to_quick, [[0, 0, KIB]]).wait(10)
        assert leader.is_alive()
        stuck.cancel()
        leader.join(10)
        assert not leader.is_alive()


def test_an_engine_with_queued_transfers_is_forgotten_once_closed(three: Three) -> None:
    waiting = [three.write(three.to_hung, 50) for _ in range(5)]
    three.near.close()
    wait_until(lambda: all(transfer.done() for transfer in waiting), "closing ends them")
