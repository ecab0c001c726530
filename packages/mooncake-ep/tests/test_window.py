"""Windows: what is waited for arrives, and who is gone is not waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from mooncake_ep import _core

REACHED, TIMED_OUT, DIED, ENDED = range(4)
SOON_NS = 120 * 10**9


def test_a_word_is_seen_with_what_was_written_before() -> None:
    ours = _core.Window.create(1 << 20)
    theirs = _core.Window.open(f"/proc/{os.getpid()}/fd/{ours.fd}", 1 << 20)
    seen = []

    def wait() -> None:
        seen.append(theirs.wait(3, 7, time.monotonic_ns() + SOON_NS, -1))
        seen.append(int(torch.from_dlpack(theirs.memory(4096, 8))[5]))

    waiter = threading.Thread(target=wait)
    waiter.start()
    torch.from_dlpack(ours.memory(4096, 8)).fill_(9)
    ours.store(3, 7)
    waiter.join(120)
    assert seen == [REACHED, 9]
    assert theirs.load(3) == 7


def test_a_wait_ends_at_its_deadline_and_a_reached_word_needs_none() -> None:
    window = _core.Window.create(1 << 16)
    window.store(2, 5)
    assert window.wait(2, 5, 0, -1) == REACHED
    assert window.wait(2, 6, time.monotonic_ns() + 10**7, -1) == TIMED_OUT


def test_a_writer_that_was_killed_is_not_waited_for() -> None:
    window = _core.Window.create(1 << 16)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:
        pidfd = os.pidfd_open(writer.pid)
        try:
            writer.send_signal(signal.SIGKILL)
            assert window.wait(2, 1, time.monotonic_ns() + SOON_NS, pidfd) == DIED
            window.store(2, 1)
            assert window.wait(2, 1, time.monotonic_ns() + SOON_NS, pidfd) == REACHED
        finally:
            os.close(pidfd)


def test_memory_outlives_the_window_that_it_is_of() -> None:
    kept = torch.from_dlpack(_core.Window.create(1 << 16).memory(64, 128))
    kept.fill_(3)
    assert int(kept.sum()) == 3 * 128


def test_what_is_not_there_is_refused() -> None:
    window = _core.Window.create(1 << 16)
    with pytest.raises(ValueError, match="beyond"):
        window.memory(1 << 16, 1)
    with pytest.raises(FileNotFoundError):
        _core.Window.open("/proc/self/fd/99999", 1 << 16)


def test_a_word_that_has_ended_keeps_its_value_and_takes_no_other() -> None:
    window = _core.Window.create(1 << 16)
    window.store(2, 5)
    assert not window.end(2, 5), "5 was reached"
    assert not window.ended(2)
    assert window.end(2, 6)
    assert window.ended(2)
    assert not window.post(2, 6)
    assert window.load(2) == 5
    forever = time.monotonic_ns() + SOON_NS
    assert window.wait(2, 5, forever, -1) == REACHED
    assert window.wait(2, 6, forever, -1) == ENDED
    window.store(2, 7)
    assert window.post(2, 8)
    assert window.wait(2, 8, forever, -1) == REACHED


def test_who_waits_for_a_word_wakes_when_it_ends() -> None:
    ours = _core.Window.create(1 << 16)
    theirs = _core.Window.open(f"/proc/{os.getpid()}/fd/{ours.fd}", 1 << 16)
    seen: list[int] = []
    waiter = threading.Thread(target=lambda: seen.append(ours.wait(2, 1, time.monotonic_ns() + SOON_NS, -1)))
    waiter.start()
    assert theirs.end(2, 1)
    waiter.join(120)
    assert seen == [ENDED]
