"""Stands for election for as long as it lives, and keeps what it won."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from mooncake_store._core import Tenure
from mooncake_store._errors import CoordinationUnavailable
from mooncake_store.cluster.contract import MAX_EPOCH, Coordination, Term, lease_clock_s

__all__ = ["Candidate"]

# Two renewals may be lost before a term ends.
KEEPS_PER_TTL = 4
LONGEST_LOOK_S = 0.25

log = logging.getLogger(__name__)


class Candidate:
    """One master's standing in its cluster. Thread-safe.

    ``on_elected(epoch)`` and ``on_deposed(why)`` are called in turns, on one thread. A term may be over
    before ``on_deposed`` is called, so whoever answers in its name asks :meth:`in_office` at the last moment.

    Attributes:
        tenure: of the term; while one is to be left or was lost, it is not held.
    """

    def __init__(
        self,
        coordination: Coordination,
        address: str,
        ttl_s: float,
        on_elected: Callable[[int], None],
        on_deposed: Callable[[str], None],
    ) -> None:
        self._coordination = coordination
        self._address = address
        self._ttl_s = ttl_s
        self._on_elected = on_elected
        self._on_deposed = on_deposed
        self._stop = threading.Event()
        self._terms = threading.Lock()  # held where the term changes
        self._term: Term | None = None
        self.tenure = Tenure()
        self._floor = 0
        self._trouble = ""
        self._thread = threading.Thread(target=self._run, name="mooncake-store-candidate", daemon=True)

    def start(self) -> None:
        """Begin. Returns at once."""
        self._thread.start()

    def in_office(self, epoch: int) -> bool:
        """Whether nobody else can have been elected since this candidate won ``epoch``."""
        term = self._term
        return term is not None and term.leader.epoch == epoch and lease_clock_s() < term.until_s

    def step_down(self, seen: int) -> None:
        """Somebody has seen this epoch, above that of the term: the coordination had forgotten it.

        The next term will be above.
        """
        if seen >= MAX_EPOCH:
            return  # no coordination gives such; whoever says so is to be ignored
        self._floor = max(self._floor, seen)
        with self._terms:
            if self._term is not None and self._term.leader.epoch < seen:
                self._take(None)

    def stop(self) -> None:
        """Resign, so that others need not wait, and end the thread. Safe to call twice."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            term = self._stand()
            if term is None:
                # Jitter: candidates that lost a leader together must not ask together for ever.
                self._stop.wait(min(self._ttl_s / 4, LONGEST_LOOK_S) * random.uniform(0.5, 1))
                continue
            self._floor = max(self._floor, term.leader.epoch)
            with self._terms:
                self.tenure = Tenure()  # whoever has that of an earlier term is out
                self._take(term)
            log.info("elected cluster=%s epoch=%d", self._coordination.where, term.leader.epoch)
            self._on_elected(term.leader.epoch)
            why = self._hold()
            with self._terms:
                last = self._term
                self._take(None)
            log.warning(
                "deposed cluster=%s epoch=%d why=%r", self._coordination.where, term.leader.epoch, why
            )
            # First no more answers, then somebody else may be elected.
            self._on_deposed(why)
            self._resign(last or term)

    def _take(self, term: Term | None) -> None:
        self._term = term
        self.tenure.last(0.0 if term is None else term.until_s)

    def _stand(self) -> Term | None:
        try:
            leader = self._coordination.leader()
            if leader is not None:
                # A service that forgets everything forgets the leader's epoch, too.
                self._floor = max(self._floor, leader.epoch)
                return None
            term = self._coordination.campaign(self._address, self._ttl_s, self._floor)
        except CoordinationUnavailable as error:
            self._note(str(error))
            return None
        self._note("")
        return term

    def _hold(self) -> str:
        """Keep the term; returns why it is over."""
        pause_s = self._ttl_s / KEEPS_PER_TTL
        while True:
            if self._stop.wait(pause_s):
                return "this master stops"
            term = self._term
            if term is None:
                return "a member knows a higher epoch"
            if lease_clock_s() >= term.until_s:
                return f"the term ran out: {self._trouble or 'this process was stopped for too long'}"
            pause_s = self._keep(term)
            if self._term is None:
                return "another was elected, or the service has forgotten this one"

    def _keep(self, term: Term) -> float:
        """Keep the term once; returns when to do so again."""
        try:
            kept = self._coordination.keep(term, self._ttl_s)
        except CoordinationUnavailable as error:
            self._note(str(error))
            return self._ttl_s / KEEPS_PER_TTL / 4
        self._note("")
        with self._terms:
            if self._term is term:  # else told to step down meanwhile
                self._take(kept)
        return self._ttl_s / KEEPS_PER_TTL

    def _resign(self, term: Term) -> None:
        try:
            self._coordination.resign(term)
        except CoordinationUnavailable as error:
            log.debug("the term is left to run out: %s", error)

    def _note(self, trouble: str) -> None:
        if trouble and not self._trouble:
            log.warning("the cluster's coordination does not answer: %s", trouble)
        elif self._trouble and not trouble:
            log.warning("the cluster's coordination answers again")
        self._trouble = trouble
