"""The system refuses threads and descriptors for a while: errors say so, and afterwards all goes on."""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mooncake_transfer import Transfer, TransferEngine
from mooncake_transfer._fencing import Fencer
from mooncake_transfer._notices import NoticeReader
from mooncake_transfer.errors import IntegrityError, TransferError
from mooncake_transfer.testing.fake import FakeFabric
from mooncake_transfer.testing.fixtures import bytes_of, wait_until

NBYTES = 4096
DEADLINE_S = 20.0
NO_THREAD = r"cannot start thread '{}.*: can't start new thread; raise `ulimit -u`"


class Pair:
    """Two engines, and what is written from one to the other."""

    def __init__(self, stack: ExitStack) -> None:
        self.fabric = stack.enter_context(FakeFabric())
        self.near = stack.enter_context(TransferEngine(self.fabric.config("near")))
        far = stack.enter_context(TransferEngine(self.fabric.config("far")))
        self.local, self.owned = self.near.allocate(NBYTES), far.allocate(NBYTES)
        self.remote = self.near.import_region(self.owned.descriptor())
        bytes_of(self.local)[:] = np.resize(np.arange(251, dtype=np.uint8), NBYTES)

    def write(self, verify: bool = False) -> Transfer:
        return self.near.write(self.local, self.remote, [[0, 0, NBYTES]], verify=verify)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@contextmanager
def no_threads(name: str) -> Iterator[None]:
    """No thread of that name starts meanwhile."""
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        real(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


@contextmanager
def failing(module: object, function: str, at: int) -> Iterator[None]:
    """The call of that number, from 0, finds no descriptor left."""
    real, calls = getattr(module, function), 0

    def call(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, call)
        yield


def test_what_no_thread_compares_ends_so_and_the_next_is_compared(pair: Pair) -> None:
    with no_threads("mooncake-integrity"):
        transfer = pair.write(verify=True)
        reason = "could not be compared: " + NO_THREAD.format("mooncake-integrity")
        with pytest.raises(IntegrityError, match=reason):
            transfer.wait(DEADLINE_S)
    for _ in range(3):
        pair.write(verify=True).wait(DEADLINE_S)
    assert np.array_equal(bytes_of(pair.local), bytes_of(pair.owned))


def test_a_fence_that_no_thread_asks_for_is_answered_with_the_reason() -> None:
    class Core:
        def __init__(self) -> None:
            self.answers: list[tuple[int, str]] = []

        def fence_answered(self, epoch: int, failure: str) -> None:
            self.answers.append((epoch, failure))

    class Closing:
        def _require_open(self) -> None:
            raise TransferError("on purpose")

    core, engine = Core(), Closing()
    fencer = Fencer(engine, core, DEADLINE_S)  # type: ignore[arg-type]
    with no_threads("mooncake-fence"):
        fencer.ask("host:1", 7)
    ((epoch, failure),) = core.answers
    assert epoch == 7
    assert "cannot start thread 'mooncake-fence host:1'" in failure
    fencer.ask("host:1", 8)
    wait_until(lambda: core.answers[1:] == [(8, "on purpose")], "the next one was asked for")
    fencer.stop()


def test_a_notice_that_cannot_be_handled_does_not_hold_up_those_after_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handled = threading.Event()

    class Core:
        def __init__(self) -> None:
            self.notices = [("held", "", "", "", "", 1), ("fence", "host:1", "", "", "", 2)]

        def next_notice(self, timeout_s: float) -> tuple[str, str, str, str, str, int] | None:
            return self.notices.pop(0) if self.notices else None

    def fail(ticket: int) -> None:
        raise RuntimeError("on purpose")

    reader = NoticeReader(Core(), fail, lambda peer, epoch: handled.set())  # type: ignore[arg-type]
    reader.start()
    assert handled.wait(DEADLINE_S)
    reader.stop()
    assert "handling held of" in caplog.text
    assert "on purpose" in caplog.text


@pytest.mark.parametrize(
    ("shortage", "kept"),
    [
        (lambda: failing(select, "epoll", 0), 0),
        (lambda: failing(os, "eventfd", 0), 0),
        (lambda: failing(os, "eventfd", 1), 2),  # those of the thread, which is there by then
        (lambda: no_threads("mooncake-watcher"), 0),
    ],
    ids=["epoll", "first eventfd", "second eventfd", "thread"],
)
def test_a_future_that_cannot_be_had_is_an_error_and_the_next_one_ends(
    pair: Pair, shortage: Callable[[], AbstractContextManager[None]], kept: int
) -> None:
    device = pair.fabric.device("near")
    device.freeze()
    transfer = pair.write()
    before = open_files()
    with shortage(), pytest.raises(TransferError, match=r"ulimit -[nu]"):
        transfer.future()
    assert open_files() == before + kept
    assert transfer.state == "running"
    future = transfer.future()
    device.thaw()
    assert future.result(DEADLINE_S) is None


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
