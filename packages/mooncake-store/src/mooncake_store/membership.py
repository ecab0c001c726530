"""Being a client of a master: joining, staying joined, and coming back after the master was lost."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import TypeVar

from mooncake_store import protocol
from mooncake_store._errors import MasterRefused, MasterUnreachable, StoreClosed, StoreError
from mooncake_store.config import StoreConfig
from mooncake_store.link import Link
from mooncake_store.notices import Notices
from mooncake_store.own_segment import OwnSegment
from mooncake_store.protocol import FromMember, Reply, Request, Stale
from mooncake_transfer.errors import TransferError

__all__ = ["Membership"]

FIRST_PAUSE_S = 0.05
RENEW_TIMEOUT_S = 10.0
RING_PAUSE_S = 0.01
R = TypeVar("R")

log = logging.getLogger(__name__)


class Membership:
    """One client's standing with its master. Thread-safe.

    While the master is away every call fails at once with MasterUnreachable, and a background thread tries
    to come back. Coming back means starting empty: a fresh segment, no leases, no reservations.

    Attributes:
        client: the id this client chose for itself.
        reservation_ttl_s: how long the master waits for a commit.
    """

    def __init__(
        self,
        open_link: Callable[[], Link],
        config: StoreConfig,
        segment: OwnSegment | None,
        notices: Notices,
        on_segments: Callable[[set[int]], None],
    ) -> None:
        self.client = secrets.randbits(63) | 1
        self.reservation_ttl_s = config.reservation_ttl_s
        self._open_link = open_link
        self._config = config
        self._segment = segment
        self._notices = notices
        self._on_segments = on_segments
        self._lease_ttl_s = config.lease_ttl_s
        self._joining = threading.Lock()
        self._changed = threading.Condition()  # guards all below
        self._link: Link | None = None
        self._epoch = 0
        self._why_down = "it has not been asked yet"
        self._leases: set[int] = set()
        self._rung = False
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncake-store-client", daemon=True)

    def start(self) -> None:
        """Join for the first time and start the thread. Raises MasterUnreachable, MasterRefused."""
        self._join()
        self._thread.start()

    def ring(self) -> None:
        """The master says that notices wait. Never blocks."""
        with self._changed:
            self._rung = self._notices.wanted
            self._changed.notify_all()

    def ask(self, request: FromMember, answer: type[R]) -> R:
        """Have the master answer, joining it again first if it has forgotten this client.

        ``request.epoch`` then is the epoch of the master that answered. Raises MasterUnreachable,
        MasterRefused, StoreClosed.
        """
        for attempt in range(2):
            link, request.epoch = self._current()
            reply = self._call(link, request)
            if not isinstance(reply, Stale):
                return _expect(reply, answer)
            self._lose(link, reply.reason)
            if attempt == 0:
                self._rejoin()
        raise MasterUnreachable(f"the store master does not keep this client: {self._why_down}")

    def conclude(self, request: FromMember, epoch: int, answer: type[R]) -> R | None:
        """End what an answer of the master of ``epoch`` began; None when that standing is over, and it with
        it.
        """
        link, request.epoch = self._current()[0], epoch
        reply = self._call(link, request)
        if isinstance(reply, Stale):
            if epoch == self._epoch:
                self._lose(link, reply.reason)
            return None
        return _expect(reply, answer)

    def hold(self, lease: int) -> None:
        """Renew this lease from now on."""
        with self._changed:
            self._leases.add(lease)

    def let_go(self, lease: int) -> None:
        """Do not renew this lease any more."""
        with self._changed:
            self._leases.discard(lease)

    def close(self) -> None:
        """Leave the master, if it answers, and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._joining:
            if self._link is None:
                return
            request = protocol.Unmount(client=self.client, epoch=self._epoch)
            try:
                self._link.call(request, self._config.call_timeout_s)
            except StoreError as error:
                log.debug("the store master was not told that this client leaves: %s", error)

    def _current(self) -> tuple[Link, int]:
        with self._changed:
            if self._closed:
                raise StoreClosed("the store has been closed")
            if self._link is None:
                raise MasterUnreachable(
                    f"the store master is away ({self._why_down}); the client keeps trying"
                )
            return self._link, self._epoch

    def _call(self, link: Link, request: FromMember, timeout_s: float | None = None) -> Reply:
        request.client = self.client
        try:
            return link.call(
                _as_request(request), self._config.call_timeout_s if timeout_s is None else timeout_s
            )
        except MasterUnreachable as error:
            self._lose(link, str(error))
            raise

    def _lose(self, link: Link, why: str) -> None:
        with self._changed:
            if self._link is link:
                self._link = None
                self._why_down = why
                self._leases.clear()
                self._changed.notify_all()
                log.warning("lost the store master: %s", why)

    def _rejoin(self) -> None:
        try:
            self._join()
        except (TransferError, TimeoutError) as error:
            raise MasterUnreachable(f"cannot come back to the store master: {error}") from error

    def _join(self) -> None:
        with self._joining:
            if self._closed:
                raise StoreClosed("the store has been closed")
            if self._link is not None:
                return
            again = self._epoch != 0
            link = self._open_link()
            segment = self._segment
            if segment is not None and again:
                segment.renew(RENEW_TIMEOUT_S)
            region = segment.region if segment is not None else None
            request = protocol.Mount(
                client=self.client,
                nbytes=region.nbytes if region is not None else 0,
                descriptor=region.descriptor() if region is not None else b"",
            )
            mounted = _expect(link.call(request, self._config.call_timeout_s), protocol.Mounted)
            self._enter(link, mounted, again)

    def _enter(self, link: Link, mounted: protocol.Mounted, again: bool) -> None:
        self._notices.restart(mounted.epoch, cleared=again)
        if self._segment is not None:
            self._segment.mounted(mounted.epoch, mounted.segment)
        self.reservation_ttl_s = mounted.reservation_ttl_s
        self._lease_ttl_s = mounted.lease_ttl_s
        with self._changed:
            self._link, self._epoch = link, mounted.epoch
        if again:
            log.info("came back to the store master, with an empty segment")

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            joined = self._link is not None
            self._wait(joined, min(self._config.heartbeat_s, self._lease_ttl_s / 4) if joined else pause_s)
            if self._closed:
                return
            if self._link is not None:
                pause_s = FIRST_PAUSE_S
                self._beat()
            elif not joined:  # the first try comes one pause after the loss
                pause_s = min(2 * pause_s, self._config.reconnect_max_s)
                self._try_to_join()

    def _wait(self, joined: bool, timeout_s: float) -> None:
        """Until the bell rings, the standing is not ``joined`` any more, the store closes, or time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._rung or joined != (self._link is not None), timeout_s
            )
            if self._rung:
                # One answer for the whole burst of evictions that this is probably the first of.
                self._changed.wait_for(lambda: self._closed, RING_PAUSE_S)
            self._rung = False

    def _beat(self) -> None:
        with self._changed:
            leases = list(self._leases)
        request = protocol.Heartbeat(leases=leases, notices_seen=self._notices.seen)
        try:
            link, request.epoch = self._current()
            reply = self._call(link, request, min(self._config.call_timeout_s, self._lease_ttl_s / 2))
        except StoreError as error:
            log.debug("heartbeat failed: %s", error)
            return
        if isinstance(reply, Stale):
            self._lose(link, reply.reason)
        else:
            alive = _expect(reply, protocol.Alive)
            self._notices.accept(request.epoch, alive.notices)
            self._on_segments(set(alive.segments))

    def _try_to_join(self) -> None:
        try:
            self._join()
        except (StoreError, TransferError, TimeoutError) as error:
            expected = isinstance(error, MasterUnreachable) or str(error) == self._why_down
            log.log(
                logging.DEBUG if expected else logging.WARNING,
                "cannot come back to the store master: %s",
                error,
            )
            self._why_down = str(error)


def _expect(reply: object, answer: type[R]) -> R:
    if not isinstance(reply, answer):
        raise MasterRefused(f"the store master answered {type(reply).__name__} instead of {answer.__name__}")
    return reply


def _as_request(request: FromMember) -> Request:
    assert isinstance(request, Request), f"{type(request).__name__} is no request"
    return request
