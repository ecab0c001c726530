"""Giving memory back while this engine, or a peer, still uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from mooncake_transfer import Region, RemoteRegion, Transfer, TransferEngine
from mooncake_transfer.errors import ConfigError, RegionBusy, RegionClosed, RegionRefused
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

DEADLINE_S = 10.0
SHORT_S = 0.1
NBYTES = 4096
ALL = [[0, 0, NBYTES]]


class Held:
    """A read that the owner's device holds in its memory: it uses ``local`` here and ``owned`` there."""

    def __init__(self, stack: ExitStack) -> None:
        fabric = stack.enter_context(FakeFabric())
        self.near = stack.enter_context(TransferEngine(fabric.config("near")))
        self.far = stack.enter_context(TransferEngine(fabric.config("far")))
        self.device = fabric.device("far")
        stack.callback(self.device.release)
        self.local: Region = self.near.allocate(NBYTES, name="local")
        self.owned: Region = self.far.allocate(NBYTES, name="owned")
        self.owned.view()[:] = b"o" * NBYTES
        self.remote: RemoteRegion = self.near.import_region(self.owned.descriptor())
        self.device.hold()
        self.transfer = self.read()
        wait_until(lambda: self.device.held() == 1, "the owner's device holds the read")

    def read(self) -> Transfer:
        return self.near.read(self.local, self.remote, ALL)

    def finish(self) -> None:
        self.device.release()
        self.transfer.wait(DEADLINE_S)
        assert bytes(bytes_of(self.local)) == b"o" * NBYTES


@pytest.fixture
def held() -> Iterator[Held]:
    with ExitStack() as stack:
        yield Held(stack)


# Whose, what, and where it stands.
USED = r"'local' is used by 1 transfers of this engine, such as the read from .* \(0 of .*fake.*\); wait"


def closing(region: Region, in_use: str = "wait") -> tuple[threading.Thread, list[BaseException]]:
    """Close it in a thread; what that raised is in the list."""
    raised: list[BaseException] = []

    def close() -> None:
        try:
            region.close(DEADLINE_S, in_use=in_use)  # type: ignore[arg-type]
        except BaseException as error:  # the test looks at whatever it is
            raised.append(error)

    thread = threading.Thread(target=close)
    thread.start()
    return thread, raised


def test_refuse_raises_at_once_for_an_own_transfer_and_changes_nothing(held: Held) -> None:
    began = time.monotonic()
    with pytest.raises(RegionBusy, match=USED):
        held.local.close(DEADLINE_S, in_use="refuse")
    assert time.monotonic() - began < DEADLINE_S / 2
    second = held.read()  # it takes transfers as before
    descriptor = held.local.descriptor()
    assert held.far.import_region(descriptor).nbytes == NBYTES
    held.finish()
    second.wait(DEADLINE_S)
    held.local.close(in_use="refuse")
    with pytest.raises(RegionClosed):
        held.read()


def test_wait_takes_no_new_transfers_and_returns_after_the_one_under_way(held: Held) -> None:
    thread, raised = closing(held.local)

    def no_new_transfers() -> bool:
        try:
            held.read().cancel()
        except RegionClosed:
            return True
        return False

    wait_until(no_new_transfers, "closing has begun")
    assert thread.is_alive()
    assert not held.transfer.done()
    held.device.release()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert raised == []
    held.transfer.wait(0)


def test_wait_beyond_its_timeout_is_an_error_and_closing_again_ends_it(held: Held) -> None:
    with pytest.raises(RegionBusy, match=r"'local' is used by 1 transfers of this engine.*close again"):
        held.local.close(SHORT_S)
    with pytest.raises(RegionClosed):
        held.read()
    with pytest.raises(RegionBusy):
        held.local.close(SHORT_S)
    held.device.release()
    held.transfer.wait(DEADLINE_S)
    held.local.close(DEADLINE_S)
    held.local.close(0)  # twice is safe


@pytest.mark.parametrize("in_use", ["wait", "refuse"])
def test_a_peers_operation_is_waited_for_either_way_and_later_ones_are_refused(
    held: Held, in_use: str
) -> None:
    thread, raised = closing(held.owned, in_use)

    elsewhere = held.near.allocate(NBYTES)

    def peers_are_refused() -> bool:
        before = held.device.held()
        late = held.near.read(elsewhere, held.remote, ALL)
        wait_until(lambda: late.done() or held.device.held() > before, "it is refused or let in")
        if not late.done():  # the thread has not begun; this one is held as well
            return False
        with pytest.raises(RegionRefused):
            late.wait(0)
        return True

    wait_until(peers_are_refused, "the key is gone")
    assert thread.is_alive()
    held.finish()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert raised == []


@pytest.mark.parametrize("in_use", ["wait", "refuse"])
def test_a_peers_operation_that_outlasts_the_timeout_is_an_error_and_the_memory_stays(
    held: Held, in_use: str
) -> None:
    began = time.monotonic()
    with pytest.raises(RegionBusy, match=r"'owned' is revoked, but peers still use it: fake fake0: 1 op"):
        held.owned.close(SHORT_S, in_use=in_use)  # type: ignore[arg-type]
    assert SHORT_S <= time.monotonic() - began < DEADLINE_S
    with pytest.raises(RegionRefused):
        held.near.read(held.near.allocate(NBYTES), held.remote, ALL).wait(DEADLINE_S)
    held.finish()
    held.owned.close(DEADLINE_S, in_use=in_use)  # type: ignore[arg-type]


def test_a_prepared_transfer_is_refused_once_the_remote_region_is_closed(held: Held) -> None:
    prepared = held.near.prepare_write(held.local, held.remote, ALL)
    held.finish()
    prepared.post().wait(DEADLINE_S)
    held.remote.close()
    for options in ({}, {"verify": True}, {"priority": "high"}):
        with pytest.raises(RegionClosed, match=r"remote region 'owned' of .* was closed; import it again"):
            prepared.post(**options)  # type: ignore[arg-type]


def test_another_word_for_in_use_is_refused(held: Held) -> None:
    with pytest.raises(ConfigError, match=r"in_use is 'abort'; it must be 'wait' or 'refuse'"):
        held.local.close(in_use="abort")  # type: ignore[arg-type]
    held.finish()
