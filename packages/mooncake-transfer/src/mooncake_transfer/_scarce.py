"""Threads and descriptors, which the system may refuse: then the error says what to raise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mooncake_transfer._errors import TransferError

__all__ = ["event_descriptor", "none_left", "start_thread"]


def start_thread(thread: threading.Thread) -> None:
    """Start it. Raises TransferError when the system has no thread left."""
    try:
        thread.start()
    except RuntimeError as error:
        raise TransferError(
            f"cannot start thread {thread.name!r}: {error}; "
            "raise `ulimit -u`, or pids.max of the control group"
        ) from error


def none_left(what: str, error: OSError) -> TransferError:
    """What to raise when a descriptor for ``what`` cannot be had."""
    return TransferError(f"no descriptor for {what}: {error.strerror}; raise `ulimit -n`")


@contextmanager
def event_descriptor() -> Iterator[int]:
    """An eventfd that does not block, closed at the end. Raises TransferError when there is none left."""
    try:
        descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    except OSError as error:
        raise none_left("the end of a transfer", error) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
