"""Waits that end before the transfer say what they waited for: peer, rail and cause."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake_transfer import Caller, Transfer, TransferEngine
from mooncake_transfer._watching import Watcher
from mooncake_transfer.errors import (
    CallTimeout,
    ConfigError,
    EngineClosed,
    MemoryInUse,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from mooncake_transfer.log_format import fields_of
from mooncake_transfer.testing.fake import FakeDevice, FakeFabric

DEADLINE_S = 20.0
CAUSE = r"write to region 'kv' of {peer} did not finish within {s} s: 0 of 4096 bytes were moved, .*fake"


class Stuck:
    """A peer whose device moves nothing until it is thawed."""

    def __init__(self, device: FakeDevice, near: TransferEngine, far: TransferEngine) -> None:
        self.device, self.near, self.far = device, near, far
        self.local = near.allocate(4096)
        self.remote = near.import_region(far.allocate(4096, name="kv").descriptor())
        device.freeze()

    def write(self) -> Transfer:
        return self.near.write(self.local, self.remote, [[0, 0, 4096]])

    def cause(self, within: str) -> str:
        return CAUSE.format(peer=self.far.address, s=within)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("near")) as near,
        TransferEngine(fabric.config("far")) as far,
    ):
        stuck = Stuck(fabric.device("near"), near, far)
        yield stuck
        stuck.device.thaw()


@pytest.mark.parametrize("ask", [lambda f: f.result(0.05), lambda f: f.exception(0.05)])
def test_a_future_that_is_not_done_says_what_it_waits_for(
    stuck: Stuck, ask: Callable[[concurrent.futures.Future[None]], None]
) -> None:
    transfer = stuck.write()
    future = transfer.future()
    with pytest.raises(TransferTimeout, match=stuck.cause("0.05")) as caught:
        ask(future)
    assert isinstance(caught.value, TimeoutError)
    assert transfer.state == "running", "only the wait has ended"
    stuck.device.thaw()
    assert future.result(DEADLINE_S) is None
    assert future.exception(DEADLINE_S) is None
    assert transfer.done()


def test_a_future_gives_how_the_transfer_ended(stuck: Stuck) -> None:
    transfer = stuck.write()
    future = transfer.future()
    transfer.cancel()
    with pytest.raises(TransferCancelled):
        future.result(DEADLINE_S)
    late = stuck.near.write(stuck.local, stuck.remote, [[0, 0, 4096]], deadline_s=0.05).future()
    with pytest.raises(TransferTimeout, match="deadline"):
        late.result(DEADLINE_S)


def test_a_transfer_that_was_never_posted_has_no_future_and_leaves_nothing_behind(stuck: Stuck) -> None:
    used = stuck.write().future()
    stuck.device.thaw()
    used.result(DEADLINE_S)
    transfer = stuck.near.prepare_write(stuck.local, stuck.remote, [[0, 0, 64]])
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(ConfigError, match="never posted"):
            transfer.future()
    assert len(list(Path("/proc/self/fd").iterdir())) < open_files + 20
    stuck.near.close()
    with pytest.raises(ConfigError, match="never posted"):
        transfer.future()


def test_a_watcher_refuses_after_its_end_and_forgets_what_it_cannot_watch() -> None:
    class Unposted:
        def signal_when_done(self, signal: int) -> None:
            raise ConfigError("never posted")

    watcher = Watcher()
    with pytest.raises(ConfigError, match="never posted"):
        watcher.watch(Unposted(), lambda: None, {})  # type: ignore[arg-type]
    assert not watcher._callbacks
    watcher.stop()
    with pytest.raises(EngineClosed, match="has been closed"):
        watcher.watch(Unposted(), lambda: None, {})  # type: ignore[arg-type]


def test_a_callback_that_ends_its_thread_is_logged_with_peer_and_region(
    stuck: Stuck, caplog: pytest.LogCaptureFixture
) -> None:
    called = threading.Event()

    def leave(future: object) -> None:
        raise SystemExit(3)

    stuck.write().future().add_done_callback(leave)
    stuck.device.thaw()
    after = stuck.write().future()  # the watcher's thread takes one after another
    after.add_done_callback(lambda future: called.set())
    after.result(DEADLINE_S)
    assert called.wait(DEADLINE_S)
    stuck.near.close()  # which joins that thread
    (record,) = [record for record in caplog.records if "callback" in record.getMessage()]
    assert fields_of(record) == {"peer": stuck.far.address, "region": "kv"}


def test_a_future_s_wait_that_is_no_time_is_refused(stuck: Stuck) -> None:
    with pytest.raises(ConfigError, match="timeout is 'soon'"):
        stuck.write().future().result("soon")  # type: ignore[arg-type]


def test_a_timed_await_raises_what_a_timed_wait_does(stuck: Stuck) -> None:
    transfer = stuck.write()

    async def wait() -> None:
        await transfer.wait_async(timeout_s=0.05)

    with pytest.raises(TransferTimeout, match=stuck.cause("0.05")):
        asyncio.run(wait())
    assert transfer.state == "timed out"


def test_of_two_that_await_one_the_other_learns_whose_limit_has_passed(stuck: Stuck) -> None:
    transfer = stuck.write()

    async def wait() -> list[BaseException | None]:
        both = (transfer.wait_async(0.05), transfer.wait_async(DEADLINE_S))
        return await asyncio.gather(*both, return_exceptions=True)

    for error in asyncio.run(wait()):
        assert isinstance(error, TransferTimeout)
        assert re.match(stuck.cause("0.05"), str(error))
    assert re.match(stuck.cause("0.05"), transfer.status().failure)


def none_left(*arguments: object) -> int:
    raise OSError(errno.EMFILE, "Too many open files")


def not_duplicated(transfer: Transfer, signal: int) -> None:
    raise TransferError("cannot duplicate the event descriptor: Too many open files")


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("target", "name", "shortage"),
    [
        (os, "eventfd", none_left),
        (Transfer, "signal_when_done", not_duplicated),
        (threading.Thread, "start", no_thread),
    ],
    ids=["descriptor", "second descriptor", "thread"],
)
def test_awaiting_needs_neither_descriptor_nor_thread(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch, target: object, name: str, shortage: Callable[..., object]
) -> None:
    transfer = stuck.write()

    async def wait(timeout_s: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, shortage)
            await transfer.wait_async(timeout_s)

    with pytest.raises(TransferTimeout, match=stuck.cause("0.05")):
        asyncio.run(wait(0.05))
    assert transfer.state == "timed out"
    stuck.device.thaw()
    transfer.post()
    asyncio.run(wait(DEADLINE_S))
    assert transfer.state == "done"


def test_a_transfer_that_a_driver_does_not_let_go_of_is_given_up_by_who_awaits_it(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake_transfer.transfer.CANCEL_GRACE_S", 0.1)
    monkeypatch.setattr(Transfer, "expire", lambda transfer, limit_s: None)
    transfer = stuck.write()

    async def wait() -> None:
        await transfer.wait_async(0.05)

    with pytest.raises(MemoryInUse, match=f"{stuck.cause('0.05')}.*keep the memory and wait again"):
        asyncio.run(wait())
    assert transfer.state == "running"


def test_a_wait_tells_a_transfer_that_a_driver_does_not_let_go_of_from_one_that_was_ended() -> None:
    with (
        FakeFabric() as fabric,
        TransferEngine(fabric.config("near")) as near,
        TransferEngine(fabric.config("far")) as far,
    ):
        held = Stuck(fabric.device("near"), near, far)
        held.device.thaw()
        fabric.device("far").hold()
        transfer = held.write()
        with pytest.raises(
            MemoryInUse, match=r"a driver still uses its memory .*; keep the memory"
        ) as caught:
            transfer.wait(0.05)
        assert isinstance(caught.value, TransferTimeout)
        assert transfer.state == "running"
        fabric.device("far").release()
        transfer.wait(DEADLINE_S)


def test_what_asyncio_s_own_timeout_cut_off_is_in_its_cause(stuck: Stuck) -> None:
    transfer = stuck.write()

    async def wait() -> None:
        await asyncio.wait_for(transfer, 0.05)

    with pytest.raises(asyncio.TimeoutError) as caught:
        asyncio.run(wait())
    causes = []
    error: BaseException | None = caught.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__ or error.__context__
    assert any(stuck.far.address in cause and "fake" in cause for cause in causes), causes
    with pytest.raises(TransferCancelled):
        transfer.wait(DEADLINE_S)


def test_a_slow_handler_of_a_living_peer_is_no_unreachable_peer(stuck: Stuck) -> None:
    over = threading.Event()

    def answer(payload: bytes, caller: Caller) -> bytes:
        over.wait(DEADLINE_S)
        return payload

    stuck.far.serve("slow", answer)
    peer = stuck.near.connect(stuck.far.address)
    try:
        with pytest.raises(
            CallTimeout,
            match=rf"calling 'slow' of {stuck.far.address} \(at most 0\.05 s\).*no answer in time",
        ):
            peer.call("slow", timeout_s=0.05)
        assert peer.alive
    finally:
        over.set()
    assert peer.call("slow", b"x", timeout_s=DEADLINE_S) == b"x"
