"""Where replicas lie, and more of them: the calls of a store about copies that others make."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from mooncake_store import protocol
from mooncake_store._errors import (
    ConfigError,
    CopyFailed,
    KeyNotFound,
    MasterUnreachable,
    ProtocolMismatch,
)
from mooncake_store.batch import Batch
from mooncake_store.config import StoreConfig
from mooncake_store.copier import Copier
from mooncake_store.keys import Key
from mooncake_store.membership import Membership
from mooncake_store.policy import MAX_REPLICAS
from mooncake_store.protocol import CopyOutcome, Drained
from mooncake_store.protocol.copies import SINCE_MINOR

__all__ = ["Copying"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.1
MASTER_AWAY_S = 15.0  # longer than an election takes
WHY = {
    CopyOutcome.PENDING: "its owner has not got to it in time; it may still be made",
    CopyOutcome.FULL: "there is no room for it now; remove something, or lend more memory",
    CopyOutcome.QUOTA: "it is beyond the tenant's quota",
    CopyOutcome.NOWHERE: "no segment may take it: it is not there, takes nothing new, or its owner has a "
    "replica already",
    CopyOutcome.LOST: "the source, the target or who moved it went meanwhile; a retry is safe",
    CopyOutcome.FAILED: "its bytes could not be moved in time; a retry is safe",
    CopyOutcome.BUSY: "another replica of it is just being made; a retry is safe",
}

log = logging.getLogger(__name__)


class Copying(ABC):
    """Base of Store."""

    config: StoreConfig
    _member: Membership
    _copier: Copier | None
    _closing: threading.Event

    def replicas(self, key: Key) -> list[int]:
        """The segments (see ``segment_id``) in which whole replicas of a value lie. Raises KeyNotFound,
        KeyInvalid.
        """
        (found,) = self.batch_replicas([key])
        if found is None:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, so it lies nowhere")
        return found

    def batch_replicas(self, keys: Sequence[Key]) -> list[list[int] | None]:
        """As :meth:`replicas`, of many; None for what is not there. Neither a use nor a lease."""
        self._require_copies()
        request = protocol.FindReplicas(digests=Batch(self.config.tenant, keys).packed)
        return self._member.ask(request, protocol.Replicas).segments

    def replicate(self, keys: Sequence[Key], replicas: int, *, timeout_s: float = 30.0) -> list[CopyOutcome]:
        """Have so many replicas of each value, each with another owner: more for hot ones, or fewer again.

        It holds from now on: replicas lost with their owners are made anew. Owners make them in the
        background, by the room that a put would find or make; this waits for them, ``timeout_s`` at most.

        Returns: per key STORED when there are so many; PENDING when the time was up before; GONE for what is
        not there (any more); FULL, QUOTA, NOWHERE (there are not so many owners), LOST or FAILED after a try
        in vain, which is repeated later. Raises KeyInvalid, ConfigError.
        """
        if not 1 <= replicas <= MAX_REPLICAS:
            raise ConfigError(f"replicas is {replicas}; it must be 1 to {MAX_REPLICAS}")
        batch = Batch(self.config.tenant, keys)
        request = protocol.AskCopies(digests=batch.packed, replicas=replicas)
        return self._ask_copies(request, timeout_s) if len(batch) else []

    def copy(self, key: Key, segment: int, *, timeout_s: float = 30.0) -> None:
        """Make a replica of a value in a segment (see ``segment_id``), unless there is one. Nothing is
        evicted for it.

        Raises KeyNotFound, KeyInvalid; CopyFailed when there is no room, the owner has gone, ...
        """
        batch = Batch(self.config.tenant, [key])
        request = protocol.AskCopies(digests=batch.packed, target=segment)
        self._ask_one(key, request, timeout_s)

    def move(self, key: Key, source: int, target: int, *, timeout_s: float = 30.0) -> None:
        """As :meth:`copy` to ``target``; then the replica in the segment ``source`` leaves, when nobody reads
        it any more.
        """
        if source == target:
            raise ConfigError(f"source and target are both segment {source:x}")
        batch = Batch(self.config.tenant, [key])
        request = protocol.AskCopies(digests=batch.packed, target=target, source=source)
        self._ask_one(key, request, timeout_s)

    def drain(
        self, segment: int = 0, *, timeout_s: float = 60.0, stop: threading.Event | None = None
    ) -> Drained:
        """Let a segment (0: this store's own) become empty: it takes nothing new, and what lies there is
        copied elsewhere. Afterwards its owner may close without a value being lost.

        Where there is no room elsewhere, what would be evicted next leaves, as if the store had become
        smaller; what is read stays until it is not.

        Waits until all is done, nothing more can be done, ``timeout_s`` are over, or ``stop`` is set; returns
        how far it came (``done``, and ``reasons`` if not). It goes on in the background until
        :meth:`stop_draining`. Raises MasterUnreachable when the master stays away.
        """
        request = protocol.Drain(segment=segment, on=True)
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        away_since_s: float | None = None
        shown = Drained(segment=segment, on=True)
        while True:
            try:
                self._require_copies()
                shown = self._member.ask(request, Drained)
                away_since_s = None
            except MasterUnreachable:  # of a cluster: the next one will know, from this segment's owner
                away_since_s = away_since_s or time.monotonic()
                if time.monotonic() >= min(deadline_s, away_since_s + MASTER_AWAY_S):
                    raise
            over = shown.done or shown.stuck or time.monotonic() >= deadline_s
            if over or (stop is not None and stop.is_set()) or self._closing.is_set():
                return shown
            if segment in (0, self._own_segment()) and self._copier is not None:
                self._member.draining = True
                self._copier.wake()
            (stop or self._closing).wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def stop_draining(self, segment: int = 0) -> Drained:
        """Let a segment take new values again; what was copied stays copied."""
        self._require_copies()
        if segment in (0, self._own_segment()):
            self._member.draining = False
        return self._member.ask(protocol.Drain(segment=segment, on=False), Drained)

    @abstractmethod
    def _own_segment(self) -> int:
        """The id of the segment that this store lends; 0 for none."""

    def _require_copies(self) -> None:
        if self._member.minor < SINCE_MINOR:
            raise ProtocolMismatch(
                f"the store master speaks minor {self._member.minor} of the protocol, in which there are no "
                f"copies; upgrade its mooncake-store"
            )

    def _ask_one(self, key: Key, request: protocol.AskCopies, timeout_s: float) -> None:
        (outcome,) = self._ask_copies(request, timeout_s)
        if outcome is CopyOutcome.GONE:
            raise KeyNotFound(f"key {key!r:.80} is not in the store, or not there, so it cannot be copied")
        if outcome not in (CopyOutcome.STORED, CopyOutcome.THERE):
            raise CopyFailed(f"key {key!r:.80} was not copied to segment {request.target:x}: {WHY[outcome]}")

    def _ask_copies(self, request: protocol.AskCopies, timeout_s: float) -> list[CopyOutcome]:
        self._require_copies()
        asked = self._member.ask(request, protocol.CopiesAsked)
        deadline_s, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        while CopyOutcome.PENDING in asked.outcomes and time.monotonic() < deadline_s:
            self._closing.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            look = self._member.ask(protocol.LookAfterCopies(job=asked.job), protocol.CopiesAsked)
            # Another master knows nothing of it.
            asked = look if look.outcomes else self._member.ask(request, protocol.CopiesAsked)
        return [CopyOutcome(outcome) for outcome in asked.outcomes]
