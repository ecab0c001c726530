"""Copies weights in the background: piece by piece, within a budget of bytes per second and a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_ep._errors import ExpertLost, RepairError, RepairTimeout
from mooncake_ep.repair.sources import Source
from mooncake_transfer import Region, RemoteRegion, TransferEngine
from mooncake_transfer.errors import TransferError

__all__ = ["Copy", "CopyJob"]

PIECE_BYTES = 4 << 20  # what is moved at once: budget, deadline and cancelling are looked at in between


@dataclass(frozen=True)
class Copy:
    """Weights of one expert on their way to `target`; tried from each of the sources in turn."""

    layer: int
    expert: int
    slot: int  # -1: a host copy
    nbytes: int
    target: Region
    offset: int
    sources: tuple[Source, ...]


class CopyJob:
    """Copies under way; a thread of this process makes them one after the other.

    `bytes_per_s` bounds how fast it reads, None: as fast as it goes. `deadline_s` from now, all of it has to
    be done. A copy that fails ends the job. What is read moves with low priority among the engine's
    transfers.
    """

    def __init__(
        self,
        engine: TransferEngine,
        rank: int,
        copies: Sequence[Copy],
        *,
        bytes_per_s: float | None,
        deadline_s: float,
    ) -> None:
        if deadline_s <= 0 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise ValueError(f"deadline_s {deadline_s} and bytes_per_s {bytes_per_s} must be more than 0")
        self._engine, self._rank, self._copies = engine, rank, tuple(copies)
        self._bytes_per_s = bytes_per_s
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + deadline_s
        self._remote: dict[bytes, RemoteRegion] = {}
        self._stopped = threading.Event()
        self._failure: RepairError | None = None
        self.bytes_total = sum(copy.nbytes for copy in copies)
        self.bytes_done = 0
        self._thread = threading.Thread(target=self._run, name="mooncake-ep-repair", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def complete(self) -> bool:
        """Whether all is copied."""
        return self.done() and self._failure is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all is copied; None: until the job's own deadline.

        Raises RepairTimeout, ExpertLost or another RepairError, which name expert, slot and ranks;
        TimeoutError when only this wait was too short.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self.bytes_done} of {self.bytes_total} bytes are copied, {timeout_s} s over"
            )
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> None:
        """End it after the piece that is under way. Safe to call twice, and after its end."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for copy in self._copies:
                self._copy(copy)
        except RepairError as failure:
            self._failure = failure
        finally:
            for remote in self._remote.values():
                remote.close()

    def _copy(self, copy: Copy) -> None:
        if not copy.sources:
            raise self._error(ExpertLost, copy, "no rank that is there has it, in a slot or in host memory")
        reasons = []
        for source in copy.sources:
            before = self.bytes_done
            try:
                self._read(copy, source)
            except TransferError as failure:
                self.bytes_done = before
                reasons.append(f"rank {source.rank}: {failure}")
            else:
                return
        raise self._error(RepairError, copy, "no source could be read: " + "; ".join(reasons))

    def _read(self, copy: Copy, source: Source) -> None:
        if source.descriptor not in self._remote:
            self._remote[source.descriptor] = self._engine.import_region(
                source.descriptor, timeout_s=self._left_s(copy)
            )
        remote = self._remote[source.descriptor]
        for at in range(0, copy.nbytes, PIECE_BYTES):
            length = min(PIECE_BYTES, copy.nbytes - at)
            self._pace(copy)
            rows = [[copy.offset + at, source.offset + at, length]]
            self._engine.read(copy.target, remote, rows, priority="low").wait(self._left_s(copy))
            self.bytes_done += length

    def _pace(self, copy: Copy) -> None:
        """Wait until the budget has room for what was read so far."""
        due_s = self._began_s
        if self._bytes_per_s is not None:
            due_s += self.bytes_done / self._bytes_per_s
        wait_s = min(due_s - time.monotonic(), self._left_s(copy))
        if self._stopped.wait(max(wait_s, 0)):
            raise self._error(RepairError, copy, "the repair was cancelled")
        self._left_s(copy)

    def _left_s(self, copy: Copy) -> float:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            what = f"the deadline passed with {self.bytes_done} of {self.bytes_total} bytes copied"
            raise self._error(RepairTimeout, copy, what + "; give it more time or more bytes per second")
        return left_s

    def _error(self, kind: type[RepairError], copy: Copy, what: str) -> RepairError:
        asked = tuple(source.rank for source in copy.sources)
        return kind(
            what, layer=copy.layer, expert=copy.expert, rank=self._rank, slot=copy.slot, sources=asked
        )
