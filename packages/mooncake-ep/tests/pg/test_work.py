"""Waiting for one operation from several threads."""

import threading

import pytest

from mooncake_ep.pg.errors import GroupTimeout
from mooncake_ep.pg.work import GroupWork

LONG_S = 60.0


class Stuck(GroupWork):
    """Ends when it is told to."""

    def __init__(self):
        super().__init__([])
        self.waited_for, self.over = threading.Event(), threading.Event()

    def _finish(self, timeout_s):
        self.waited_for.set()
        assert self.over.wait(LONG_S)


def test_a_wait_ends_in_its_own_time_while_another_thread_waits_for_longer():
    work = Stuck()
    other = threading.Thread(target=work.join)
    other.start()
    try:
        assert work.waited_for.wait(LONG_S)
        with pytest.raises(GroupTimeout, match=r"within 0\.05 s"):
            work.join(0.05)
        assert other.is_alive(), "the first to wait was disturbed"
    finally:
        work.over.set()
        other.join(LONG_S)
    work.join(0.05)
