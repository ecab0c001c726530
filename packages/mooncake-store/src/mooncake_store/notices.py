"""Tells the user which of this client's values have gone, in the master's order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mooncake_store._core import Ledger, read_records
from mooncake_store.keys import DIGEST_BYTES
from mooncake_store.protocol import RecordPage

__all__ = ["Notices", "SegmentChange"]

EvictedHandler = Callable[[list[bytes]], None]
ClearedHandler = Callable[[], None]
ChangeHandler = Callable[[list["SegmentChange"]], None]
STORED, GONE = 1, 2  # kinds of records

log = logging.getLogger(__name__)


class SegmentChange(NamedTuple):
    """Bytes of a value have come to a segment, or have left it.

    Attributes:
        stored: come, else left.
        version: which version of its key: the same when it comes and when it leaves.
        key: empty when it leaves.
        nbytes: of the whole value; 0 when it leaves.
        tenant: whose key it is; empty when it leaves.
    """

    stored: bool
    version: int
    key: bytes
    nbytes: int
    tenant: str


class Notices:
    """Takes the master's records, keeps the ledger of this client's segment by them, and hands the keys of
    what has gone to handlers, on one thread, outside every lock.

    Several answers may carry the same records; their numbers tell which are new.
    """

    def __init__(self, tenant: str) -> None:
        self._tenant = tenant
        self._changed = threading.Condition()
        self._epoch = 0
        self._ledger = Ledger()
        # Keys of what this client put, for its handlers: only owners are told keys.
        self._written: dict[bytes, bytes] = {}
        self._queue: deque[list[Callable[[], None]]] = deque()
        self._queued = self._handled = 0
        self._evicted: list[EvictedHandler] = []
        self._cleared: list[ClearedHandler] = []
        self._changes: list[ChangeHandler] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def on_evicted(self, handler: EvictedHandler) -> None:
        """Call ``handler`` with the keys of each batch of notices from now on."""
        with self._changed:
            self._evicted.append(handler)
            self._start()

    def on_cleared(self, handler: ClearedHandler) -> None:
        """Call ``handler`` when the whole segment has been emptied."""
        with self._changed:
            self._cleared.append(handler)
            self._start()

    def on_change(self, handler: ChangeHandler) -> None:
        """Call ``handler`` with what comes to and leaves the segment from now on."""
        with self._changed:
            self._changes.append(handler)
            self._start()

    @property
    def seen(self) -> int:
        """Number of the last record taken."""
        return self._ledger.seen

    def seen_of(self, epoch: int) -> int:
        """Number of the last record taken of the master of ``epoch``; 0 when the client is with another."""
        with self._changed:
            return self._ledger.seen if epoch == self._epoch else 0

    def position(self) -> tuple[int, int]:
        """The epoch of the client's master, and the number of the last record taken of it."""
        with self._changed:
            return self._epoch, self._ledger.seen

    @property
    def wanted(self) -> bool:
        """Whether anybody listens."""
        return self._thread is not None

    @property
    def last_version(self) -> int:
        """The highest version of a value that ever lay in this client's segment."""
        return self._ledger.last_version

    def restart(self, epoch: int, *, cleared: bool, kept: bool = False) -> None:
        """The client has (re)joined a master: records of before are void, and unless it was ``kept``, so is
        what the segment held.
        """
        with self._changed:
            self._epoch = epoch
            self._ledger.restart(keep=kept)
            self._written.clear()
            if cleared and self._thread is not None:
                self._enqueue(list(self._cleared))

    def wrote(self, digests: bytes, keys: Sequence[bytes]) -> None:
        """This client is about to put these keys."""
        with self._changed:
            if self._thread is not None:
                for position, key in enumerate(keys):
                    self._written[digests[DIGEST_BYTES * position : DIGEST_BYTES * (position + 1)]] = key

    def accept(self, epoch: int, pages: list[RecordPage]) -> None:
        """Take the records of one answer of the master of ``epoch``."""
        if not pages:
            return
        with self._changed:
            if epoch != self._epoch:
                return
            keys = []
            for first, frames in pages:
                if self._changes:
                    self._tell_changes(first, frames)
                for digest, key, tenant in self._ledger.take(first, frames):
                    written = self._written.pop(digest, b"")
                    # Other tenants' values may lie in this segment; their keys mean nothing here.
                    told = (key if tenant == self._tenant else b"") or written
                    if told:
                        keys.append(told)
            if keys and self._thread is not None:
                self._enqueue([partial(handler, list(keys)) for handler in self._evicted])

    def _tell_changes(self, first: int, frames: bytes) -> None:
        new = read_records(frames)[max(0, self._ledger.seen + 1 - first) :]
        changes = []
        here: dict[int, bool] = {}  # versions that these records have told of
        for kind, _, version, _, key, nbytes, tenant, *_ in new:
            # Of what is here already, it tells only where else it lies.
            known = kind == STORED and here.get(version, self._ledger.find(version) is not None)
            if kind in (STORED, GONE) and not known:
                changes.append(SegmentChange(kind == STORED, version, key, nbytes, tenant))
                here[version] = kind == STORED
        if changes:
            self._enqueue([partial(handler, list(changes)) for handler in self._changes])

    def key_of(self, version: int) -> bytes:
        """The key of a version that lies in this client's segment; empty when it is not known here."""
        with self._changed:
            frame = self._ledger.find(version)
        if frame is None:
            return b""
        ((_, _, _, _, key, *_),) = read_records(frame)
        return key

    def tenant_key(self, version: int, tenant: str) -> bytes:
        """The same, but empty also when it is another tenant's."""
        with self._changed:
            frame = self._ledger.find(version)
        if frame is None:
            return b""
        ((_, _, _, _, key, _, owner, *_),) = read_records(frame)
        return key if owner == tenant else b""

    def parts(self) -> Iterator[bytes]:
        """The records of what lies in this client's segment, as frames, about 1 MiB at a time."""
        number = 0
        while (part := self.part(number)) is not None:
            yield part
            number += 1

    def part(self, number: int) -> bytes | None:
        """One of those parts, numbered from 0; None beyond the last."""
        with self._changed:
            return self._ledger.part(number)

    def flush(self, timeout_s: float) -> None:
        """Wait until handlers have had everything taken so far.

        It gives up after ``timeout_s`` with a warning: a handler waits for something that its caller holds.
        """
        if self._thread is None or threading.current_thread() is self._thread:
            return  # nobody listens, or who listens asks
        with self._changed:
            target = self._queued
            if not self._changed.wait_for(lambda: self._handled >= target or self._closed, timeout_s):
                log.warning(
                    "an on_evicted handler has not returned within %g s; a put goes on without it", timeout_s
                )

    def close(self, timeout_s: float) -> None:
        """End the thread. What has not been handed out yet is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                log.warning("an on_evicted handler still runs after the store was closed")

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mooncake-store-notices", daemon=True)
            self._thread.start()

    def _enqueue(self, calls: list[Callable[[], None]]) -> None:
        self._queue.append(calls)
        self._queued += 1
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                calls = self._queue.popleft()
            self._hand_out(calls)
            with self._changed:
                self._handled += 1
                self._changed.notify_all()

    @staticmethod
    def _hand_out(calls: list[Callable[[], None]]) -> None:
        for call in calls:
            try:
                call()
            except Exception:
                # The handler is the user's code; its failure must not end the notices to others.
                log.exception("a handler of what has gone or changed failed")
