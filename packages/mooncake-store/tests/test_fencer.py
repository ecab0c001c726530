"""The thread that shuts late writers out goes on after what it did not expect, and holds up no close."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from mooncake_store.fencer import Fencer
from mooncake_store.protocol import Regrant
from mooncake_transfer.errors import RegionBusy

LONG_S = 30.0


class Segment:
    """An own segment whose keys are ``previous`` and ``new``; each retire raises one of ``busy``."""

    def __init__(self, first: Callable[[], None], busy: list[Exception]) -> None:
        self.first, self.busy, self.begun = first, busy, 0
        self.retired = threading.Event()

    def regrant(self) -> tuple[bytes, bytes]:
        self.begun += 1
        if self.begun == 1:
            self.first()
        return b"previous", b"new"

    def retire(self, descriptor: bytes, timeout_s: float) -> bool:
        if self.busy:
            raise self.busy.pop()
        self.retired.set()
        return True


class Member:
    """A standing with a master that takes everything."""

    grace_s = 0.0

    def ask(self, request: Regrant, answer: type) -> None:
        """It has the new key."""

    def conclude(self, request: Any, epoch: int, answer: type) -> None:
        """It has the word."""


def test_a_mistake_is_logged_and_the_next_fence_is_made(
    caplog: pytest.LogCaptureFixture, eventually: Callable[..., Any]
) -> None:
    def fail() -> None:
        raise ValueError("a mistake")

    segment = Segment(fail, [RegionBusy("stopped in mid-copy")] * 2)
    fencer = Fencer(Member(), segment)  # type: ignore[arg-type]

    def retired() -> bool:
        fencer.wake()  # as each heartbeat does
        return segment.retired.is_set()

    with caplog.at_level(logging.INFO, "mooncake_store.fencer"):
        eventually(retired, LONG_S)
        fencer.close(LONG_S)
    levels = [record.levelno for record in caplog.records if "late" in record.message]
    assert levels == [logging.ERROR, logging.WARNING, logging.INFO]


def test_a_close_waits_no_longer_than_it_is_told_to() -> None:
    inside, over = threading.Event(), threading.Event()

    def stuck() -> None:
        inside.set()
        over.wait(LONG_S)

    fencer = Fencer(Member(), Segment(stuck, []))  # type: ignore[arg-type]
    fencer.wake()
    assert inside.wait(LONG_S)
    try:
        fencer.close(0.01)
        assert not over.is_set()
    finally:
        over.set()
        fencer.close(LONG_S)
