"""Being a client of a master: joining, staying joined, and coming back after the master was lost."""

from __future__ import annotations

import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mooncake_store import protocol
from mooncake_store._errors import (
    MasterNotLeading,
    MasterRefused,
    MasterUnreachable,
    RateLimited,
    StoreClosed,
    StoreError,
)
from mooncake_store.config import StoreConfig, read_token
from mooncake_store.link import Link, RemoteLink, not_answered
from mooncake_store.machine import this_machine
from mooncake_store.notices import Notices
from mooncake_store.own_segment import OwnSegment
from mooncake_store.protocol import FromMember, Limited, Reply, Request, Stale
from mooncake_store.protocol.fencing import SINCE_MINOR as REACH_SINCE_MINOR
from mooncake_store.protocol.versions import FEATURES, MINORS, agree
from mooncake_store.quick import Handed, Quick, Stage
from mooncake_store.telemetry import ClientCounters
from mooncake_transfer.errors import CallTimeout, EngineClosed, PeerUnreachable, TransferError

__all__ = ["Membership", "lease_clock"]

FIRST_PAUSE_S = 0.05
RENEW_TIMEOUT_S = 10.0
RING_PAUSE_S = 0.01
# Requests that tell of ended leases.
ENDING = (protocol.Locate, protocol.Reserve, protocol.Heartbeat)
SURE_LEASE = 0.8  # of its time, in which a lease holds for sure: clocks do not run equally fast
R = TypeVar("R")

log = logging.getLogger(__name__)


def lease_clock() -> float:
    """Seconds by which leases are judged; they pass while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Membership:
    """One client's standing with its master. Thread-safe.

    While the master is away every call fails at once with MasterUnreachable, and a background thread tries
    to come back. Coming back means to have no leases and no reservations; the segment is kept if
    the master can take it over, else it starts empty.

    Attributes:
        client: the id this client chose for itself.
        reservation_ttl_s: how long the master waits for a commit.
        secret: known to this client and its master.
        minor: of the protocol that they speak.
        draining: the segment is to become empty; a next master is told so.
        on_copies: called, and must not block, when the master has something for this client to copy.
        on_fence: called, and must not block, when late writers are to be shut out of the segment.
        checksums: whether values get checksums, and are compared with them.
        quick: makes usual calls by itself, as long as it is told of the standing; before :meth:`start`.
        counters: counts what the client does.
    """

    def __init__(
        self,
        open_link: Callable[[], Link],
        config: StoreConfig,
        segment: OwnSegment | None,
        notices: Notices,
        on_segments: Callable[[set[int], float], None],
        address: str,
        counters: ClientCounters,
        *,
        in_cluster: bool = False,
    ) -> None:
        self.client = secrets.randbits(63) | 1
        self.reservation_ttl_s = config.reservation_ttl_s
        self.secret = b""
        self.minor = 0
        self.draining = False
        self.on_copies: Callable[[], None] | None = None
        self.on_fence: Callable[[], None] | None = None
        self.quick: Quick | None = None
        self._open_link = open_link
        self._config = config
        self._segment = segment
        self._notices = notices
        self._on_segments = on_segments
        self._address = address
        self.counters = counters
        self._in_cluster = in_cluster
        self.checksums = config.checksums
        self._lease_ttl_s = config.lease_ttl_s
        self._joining = threading.Lock()
        self._lock = threading.RLock()  # guards all below
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._epoch = 0
        self._why_down = "it has not been asked yet"
        self._leases: dict[int, float] = {}  # and when the master was asked for it, or to renew it, last
        self._broken: set[int] = set()  # those of them under which a value's memory is another's, or may be
        self._ended: list[int] = []  # leases that the next request ends
        self._beat_due_s = 0.0
        self._joined_s = 0.0  # by the lease clock
        self._idle = False  # the thread waits for something to happen
        self._rung = False
        self._mounting = False  # a master has been told of the segment, and may have given its key to others
        self._recovery = False  # of the last master: the ledger says what lies in the segment
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mooncake-store-client", daemon=True)

    @property
    def grace_s(self) -> float:
        """After this time, every lease and reservation of before has ended or been renewed."""
        return max(self.reservation_ttl_s, self._lease_ttl_s)

    def start(self) -> None:
        """Join for the first time and start the thread. Raises MasterUnreachable, MasterRefused.

        May be tried again after an error.
        """
        self._join()
        self._thread.start()

    def ring(self) -> None:
        """The master says that notices wait. Never blocks."""
        with self._changed:
            self._rung = True
            self._changed.notify_all()

    def ask(self, request: FromMember, answer: type[R]) -> R:
        """Have the master answer, joining it again first if it has forgotten this client.

        ``request.epoch`` then is the epoch of the master that answered. Raises MasterUnreachable,
        MasterRefused, RateLimited, StoreClosed. A lease in the answer is renewed until :meth:`let_go`.
        """
        for attempt in range(2):
            asked_s = lease_clock()
            link, request.epoch = self._current(request)
            reply = self._call(link, request)
            if isinstance(reply, protocol.Located) and reply.lease:
                self._hold(link, reply.lease, asked_s)
            if isinstance(reply, Limited):
                raise RateLimited(self._config.tenant, reply.retry_after_s)
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

    def reach(self, segments: dict[int, bytes], epoch: int) -> bool:
        """Put the descriptors in force in place of older ones of the same memory, as far as the master of
        ``epoch`` knows; whether there were some.
        """
        if self.minor < REACH_SINCE_MINOR:
            return False
        request = protocol.Reach(descriptors=list(segments.values()))
        answer = self.conclude(request, epoch, protocol.Reached)
        given = answer.descriptors if answer is not None else []
        newer = {
            one: new
            for (one, old), new in zip(segments.items(), given, strict=False)
            if new not in (b"", old)
        }
        segments.update(newer)
        return bool(newer)

    def take_over(self, handed: Handed) -> bool:
        """Whether the caller goes on with what quick calls have left; else the call is to be made anew.

        Raises MasterUnreachable, StoreClosed, and whatever else a question ended with.
        """
        with self._lock:
            link = self._link
        asked = isinstance(link, RemoteLink) and link.express_connection == handed.connection
        if handed.stage == Stage.OTHER_WAY and isinstance(link, RemoteLink):
            link.goes_other_way(handed.answer)
        if handed.stage == Stage.NOT_ASKED and handed.failure is not None:
            if not isinstance(handed.failure, (PeerUnreachable, CallTimeout, EngineClosed)):
                raise handed.failure
            told = not_answered("the store master", handed.failure)
            if link is not None and asked and isinstance(told, MasterUnreachable):
                self._lose(link, str(told))
            raise told from handed.failure
        return handed.stage not in (Stage.OTHER_WAY, Stage.NOT_ASKED)

    def hold(self, lease: int, epoch: int, asked_s: float) -> None:
        """Renew a lease of the master of ``epoch`` until :meth:`let_go`."""
        with self._lock:
            if self._link is not None and epoch == self._epoch:
                self._leases[lease] = asked_s

    def leases_ended(self) -> None:
        """Quick calls have ended leases: tell the master soon."""
        with self._changed:
            if self._idle:
                self._idle = False
                self._changed.notify_all()

    def _hold(self, link: Link, lease: int, asked_s: float) -> None:
        with self._lock:
            if link is self._link:  # else the standing that the lease belongs to is over
                self._leases[lease] = asked_s

    def holds(self, lease: int, epoch: int) -> bool:
        """Whether this lease of the master of ``epoch`` is known to be in force, and no owner of memory under
        it to be lost, without asking: as the last heartbeat that was answered says.
        """
        with self._changed:
            asked_s = self._held_since(lease, epoch)
            return asked_s is not None and lease_clock() - asked_s < SURE_LEASE * self._lease_ttl_s

    def confirms(self, lease: int, epoch: int) -> bool:
        """What :meth:`holds` says, but of now: the master is asked. False when it does not answer."""
        began_s = lease_clock()
        self._beat([lease])
        with self._changed:
            asked_s = self._held_since(lease, epoch)
            return asked_s is not None and asked_s >= began_s

    def _held_since(self, lease: int, epoch: int) -> float | None:
        """When the master was asked last for what it has said of a lease that is good; else None."""
        good = self._link is not None and epoch == self._epoch and lease not in self._broken
        return self._leases.get(lease) if good else None

    def _renewed(self, leases: list[int], epoch: int, alive: protocol.Alive, asked_s: float) -> None:
        with self._changed:
            if epoch != self._epoch:  # another master's leases may have the same numbers
                return
            for lease in leases:
                if lease in self._leases:  # else it was let go meanwhile
                    self._leases[lease] = max(asked_s, self._leases[lease])
            for lease in alive.expired:
                self._leases.pop(lease, None)
            self._broken.update(lease for lease in alive.broken if lease in self._leases)

    def let_go(self, lease: int, epoch: int, asked_s: float, *, soon: bool) -> bool:
        """Do not renew this lease of the master of ``epoch`` any more.

        True when it has held so far, whatever became of the master meanwhile: it was asked for at ``asked_s``
        of :func:`lease_clock`, so that its time is not over yet. With ``soon`` it then is ended with the next
        request. False: only the master knows.
        """
        with self._lock:
            self._leases.pop(lease, None)
            self._broken.discard(lease)
            young = lease_clock() - asked_s < SURE_LEASE * self._lease_ttl_s
            # Who has joined the same master again since, may own the memory, and that be given out anew.
            young = young and asked_s >= self._joined_s
            if self._closed or self._link is None or epoch != self._epoch or not young:
                return False
            if soon and self.quick is not None and self.quick.joined:
                self.quick.end(lease)  # who asks next tells of it, be it by a quick call or not
            elif soon:
                self._ended.append(lease)
            if soon and self._idle:
                self._idle = False
                self._changed.notify_all()
            return True

    def close(self) -> None:
        """Leave the master, if it answers, and end the thread."""
        with self._changed:
            self._closed = True
            if self.quick is not None:
                self.quick.leave()
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

    def _current(self, request: FromMember | None = None) -> tuple[Link, int]:
        """The standing; what is to be told with a request of it is put into ``request``."""
        with self._lock:
            if self._closed:
                raise StoreClosed("the store has been closed")
            if self._link is None:
                raise MasterUnreachable(
                    f"the store master is away ({self._why_down}); the client keeps trying"
                )
            if isinstance(request, ENDING):
                request.ended, self._ended = self._ended, []
                if self.quick is not None:
                    request.ended += self.quick.take_ended()
            return self._link, self._epoch

    def _call(self, link: Link, request: FromMember, timeout_s: float | None = None) -> Reply:
        request.client = self.client
        began_s, failed = time.monotonic(), True
        try:
            reply = link.call(request, self._config.call_timeout_s if timeout_s is None else timeout_s)
            failed = False
            return reply
        except MasterUnreachable as error:
            self._lose(link, str(error))
            raise
        finally:
            took_s = time.monotonic() - began_s
            self.counters.observe(_name_of(type(request)), took_s, failed=failed)

    def _lose(self, link: Link, why: str) -> None:
        with self._changed:
            if self._link is link:
                self._link = None
                self._why_down = why
                self._leases.clear()
                self._broken.clear()
                self._ended = []
                if self.quick is not None:
                    self.quick.leave()
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
            self._show_token(link)  # before a fence, which would have to be made once more if this failed
            keeps = segment is not None and self._mounting and self._fence(segment)
            self._mounting = True
            region = segment.region if segment is not None else None
            request = protocol.Mount(
                client=self.client,
                tenant=self._config.tenant,
                nbytes=region.nbytes if region is not None else 0,
                descriptor=segment.descriptor() if segment is not None else b"",
                minors=MINORS,
                features=list(FEATURES),
                epoch_seen=self._epoch if self._in_cluster else 0,
                segment=segment.id if segment is not None else 0,
                node=this_machine(),
                address=self._address,
                keeps=keeps,
                last_version=self._notices.last_version,
                draining=self.draining,
            )
            mounted = _expect(link.call(request, self._config.call_timeout_s), protocol.Mounted)
            agree(MINORS, (mounted.minor, mounted.minor))
            if self._in_cluster and mounted.epoch < self._epoch:
                raise MasterNotLeading(
                    f"the master of epoch {mounted.epoch} was followed by that of epoch {self._epoch}"
                )
            kept = keeps and mounted.recovery
            if kept:
                self._hand_over(link, mounted.epoch)
            self._enter(link, mounted, again, kept)

    def _show_token(self, link: Link) -> None:
        token = read_token(self._config.token_file)
        if token:
            shown = link.call(protocol.Authenticate(token=token), self._config.call_timeout_s)
            _expect(shown, protocol.Done)

    def _fence(self, segment: OwnSegment) -> bool:
        """Make an end to what others may do with the segment; whether it still has what lay in it."""
        if self._recovery and segment.rekey(RENEW_TIMEOUT_S):
            return True
        segment.renew(RENEW_TIMEOUT_S)
        return False

    def _hand_over(self, link: Link, epoch: int) -> None:
        """Tell the master what lies in the segment."""
        parts = self._notices.parts()
        frames: bytes | None = next(parts, b"")
        while frames is not None:
            following = next(parts, None)
            request = protocol.Adopt(epoch=epoch, client=self.client, frames=frames, last=following is None)
            _expect(link.call(request, self._config.call_timeout_s), protocol.Adopted)
            frames = following

    def _enter(self, link: Link, mounted: protocol.Mounted, again: bool, kept: bool) -> None:
        self._recovery = mounted.recovery
        self._notices.restart(mounted.epoch, cleared=again and not kept, kept=kept)
        if self._segment is not None:
            self._segment.mounted(mounted.epoch, mounted.segment)
        self.reservation_ttl_s = mounted.reservation_ttl_s
        self.secret = mounted.secret
        self.minor = mounted.minor
        self._lease_ttl_s = mounted.lease_ttl_s
        with self._changed:
            self._link, self._epoch, self._joined_s = link, mounted.epoch, lease_clock()
            if self.quick is not None and link.express_connection and not self._closed:
                self.quick.join(
                    link.express_connection,
                    mounted.epoch,
                    self.client,
                    self._lease_ttl_s,
                    self.reservation_ttl_s,
                    self._joined_s,
                )
        if again:
            log.info("came back to the store master, with %s segment", "the same" if kept else "an empty")

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            joined = self._link is not None
            wanted = self._wait(joined, pause_s)
            if self._closed:
                return
            if not wanted:
                continue
            if self._link is not None:
                pause_s = FIRST_PAUSE_S
                while self._beat() and not self._closed:
                    pass  # which confirms what it has just been told
            elif not joined:  # the first try comes one pause after the loss
                pause_s = min(2 * pause_s, self._config.reconnect_max_s)
                self._try_to_join()

    def _wait(self, joined: bool, pause_s: float) -> bool:
        """Until the bell rings, leases have ended, the standing is not ``joined`` any more, the store closes,
        or time is up; whether there is something to say.
        """
        timeout_s = max(0.0, self._beat_due_s - time.monotonic()) if joined else pause_s

        def over() -> bool:
            told = self._rung or bool(self._ended) or self._ended_for_s() > 0
            return self._closed or told or joined != (self._link is not None)

        with self._changed:
            self._idle = True
            if self.quick is not None:
                self.quick.idle()
            self._changed.wait_for(over, timeout_s)
            self._idle = False
            if self._rung or self._ended:
                # One answer for the whole burst that this is probably the first of.
                self._changed.wait_for(lambda: self._closed, RING_PAUSE_S)
            while self._a_call_may_tell():
                self._changed.wait_for(lambda: self._closed or self._rung, RING_PAUSE_S)
            wanted = self._rung or bool(self._ended) or self._ended_for_s() > 0
            wanted = wanted or time.monotonic() >= self._beat_due_s
            self._rung = False
            return wanted or not joined or self._link is None

    def _a_call_may_tell(self) -> bool:
        # Of leases that quick calls have just ended, the next one tells, if it comes soon.
        waits = self._link is not None and not self._closed and not self._rung and not self._ended
        return waits and 0 < self._ended_for_s() < RING_PAUSE_S and time.monotonic() < self._beat_due_s

    def _ended_for_s(self) -> float:
        return 0.0 if self.quick is None else self.quick.ended_for_s()

    def catch_up(self) -> None:
        """Take all records that the master has now, as far as it answers."""
        while self._beat():
            pass

    def _beat(self, only: list[int] | None = None) -> bool:
        """Say that this client lives, and still reads under its leases, or for now of some ``only``; whether
        there was something to be told.
        """
        with self._changed:
            leases = list(self._leases) if only is None else only
            if only is None and self.quick is not None:
                leases += self.quick.leases()
        if only is None:
            self._beat_due_s = time.monotonic() + min(self._config.heartbeat_s, self._lease_ttl_s / 4)
        request = protocol.Heartbeat(leases=leases, notices_seen=0)
        asked_s, lease_asked_s = time.monotonic(), lease_clock()
        try:
            link, request.epoch = self._current(request)
            # Each master counts its records from 1: what was seen of an earlier one's must not confirm them.
            request.notices_seen = self._notices.seen_of(request.epoch)
            reply = self._call(link, request, min(self._config.call_timeout_s, self._lease_ttl_s / 2))
        except StoreError as error:
            log.debug("heartbeat failed: %s", error)
            return False
        if isinstance(reply, Stale):
            self._lose(link, reply.reason)
            return False
        alive = _expect(reply, protocol.Alive)
        self._notices.accept(request.epoch, alive.notices)
        self._renewed(leases, request.epoch, alive, lease_asked_s)
        self._on_segments(set(alive.segments), asked_s)
        self.draining = alive.draining
        if alive.copies and self.on_copies is not None:
            self.on_copies()
        if alive.fence and self.on_fence is not None:
            self.on_fence()
        return bool(alive.notices)

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


@functools.cache
def _name_of(request: type[Request]) -> str:
    return f"master.{request.__name__}"


def _expect(reply: object, answer: type[R]) -> R:
    if not isinstance(reply, answer):
        raise MasterRefused(f"the store master answered {type(reply).__name__} instead of {answer.__name__}")
    return reply
