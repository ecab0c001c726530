"""Shuts out of this client's segment those whose reservations there have ended."""

from __future__ import annotations

import logging
import threading

from mooncake_store import protocol
from mooncake_store._errors import StoreError
from mooncake_store.membership import Membership
from mooncake_store.own_segment import OwnSegment
from mooncake_transfer.errors import DriverUnavailable, TransferError

__all__ = ["Fencer"]

PAUSE_S = 0.5
REVOKE_TIMEOUT_S = 1.0

log = logging.getLogger(__name__)


class Fencer:
    """One thread, which starts when the master wants a fence for the first time; see ``protocol.fencing``.

    Whoever reads or writes under the old key in time ends undisturbed: it is taken back only when every lease
    and reservation of before has ended or been renewed. One that is stopped in the middle of a copy is waited
    for as long as it takes, and the master keeps the room out of use.
    """

    def __init__(self, membership: Membership, segment: OwnSegment) -> None:
        self._membership = membership
        self._segment = segment
        self._changed = threading.Condition()
        self._woken = self._closed = False
        self._thread: threading.Thread | None = None
        self._said = ""

    def wake(self) -> None:
        """The master wants a fence. Never blocks."""
        with self._changed:
            if self._closed:
                return
            self._woken = True
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mooncake-store-fencer", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the thread, which may wait for an answer or a copy: for no longer than this."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._closed)
            if self._closed:
                return
            try:
                self._turn()
                self._said = ""
            except DriverUnavailable as error:
                self._say("room of a late writer stays out of use for now", error)
            except (StoreError, TransferError, TimeoutError) as error:
                log.info("room of a late writer stays out of use for now: %s", error)
            except Exception:  # else no late writer would ever be shut out again
                log.exception("room of a late writer stays out of use for now")
            with self._changed:
                self._woken = False  # what was asked meanwhile is done; the next heartbeat says what is not
                self._changed.wait_for(lambda: self._closed, PAUSE_S)

    def _turn(self) -> None:
        previous, descriptor = self._segment.regrant()
        if not descriptor:
            return
        request = protocol.Regrant(previous=previous, descriptor=descriptor)
        self._membership.ask(request, protocol.Done)
        epoch = request.epoch
        with self._changed:
            self._changed.wait_for(lambda: self._closed, self._membership.grace_s)
        while not self._closed:
            try:
                if self._segment.retire(descriptor, REVOKE_TIMEOUT_S):
                    self._membership.conclude(protocol.Fenced(descriptor=descriptor), epoch, protocol.Done)
                return
            except (TransferError, TimeoutError) as error:
                self._say(
                    "somebody who is late still has the segment, and all its late room is out of use", error
                )
            with self._changed:
                self._changed.wait_for(lambda: self._closed, PAUSE_S)

    def _say(self, what: str, error: Exception) -> None:
        """A warning, but only once until all goes well again."""
        log.log(logging.INFO if self._said == what else logging.WARNING, "%s: %s", what, error)
        self._said = what
