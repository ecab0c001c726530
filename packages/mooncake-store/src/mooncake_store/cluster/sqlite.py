"""``sqlite:FILE``: a file for the masters of one machine, whose processes share one clock."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mooncake_store._errors import CoordinationUnavailable
from mooncake_store.cluster.contract import MARGIN, Leader, Term, lease_clock_s

__all__ = ["SqliteCoordination"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SCHEMA = """
CREATE TABLE IF NOT EXISTS leadership (
    one INTEGER PRIMARY KEY CHECK (one = 1), address TEXT, epoch INTEGER, boot TEXT, until_s REAL
)
"""
Result = TypeVar("Result")


class SqliteCoordination:
    """A leadership is a row with its end by the clock since the machine started. See ``Coordination``.

    The file must be on a disk of this machine, not on one that is shared over a network.
    """

    def __init__(self, file: Path, timeout_s: float, where: str) -> None:
        self.where = where
        self._file = file
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._boot = BOOT_ID.read_text().strip()

    def campaign(self, address: str, ttl_s: float, floor: int) -> Term | None:
        """As ``Coordination.campaign``."""

        def run(rows: sqlite3.Connection) -> Term | None:
            now_s = lease_clock_s()
            found = rows.execute("SELECT epoch, boot, until_s FROM leadership").fetchone()
            last_epoch, boot, until_s = found or (0, "", 0.0)
            if boot == self._boot and until_s > now_s:
                return None
            epoch = max(last_epoch, floor) + 1
            rows.execute(
                "INSERT OR REPLACE INTO leadership VALUES (1, ?, ?, ?, ?)",
                (address, epoch, self._boot, now_s + ttl_s),
            )
            return Term(Leader(address, epoch), now_s + ttl_s * (1 - MARGIN), str(epoch))

        return self._transact(run)

    def keep(self, term: Term, ttl_s: float) -> Term | None:
        """As ``Coordination.keep``."""

        def run(rows: sqlite3.Connection) -> Term | None:
            now_s = lease_clock_s()
            changed = rows.execute(
                "UPDATE leadership SET until_s = ? WHERE epoch = ? AND boot = ? AND until_s > ?",
                (now_s + ttl_s, term.leader.epoch, self._boot, now_s),
            )
            if not changed.rowcount:
                return None
            return Term(term.leader, now_s + ttl_s * (1 - MARGIN), term.claim)

        return self._transact(run)

    def resign(self, term: Term) -> None:
        """As ``Coordination.resign``."""
        self._transact(
            lambda rows: rows.execute(
                "UPDATE leadership SET until_s = 0 WHERE epoch = ?", (term.leader.epoch,)
            )
        )

    def leader(self) -> Leader | None:
        """As ``Coordination.leader``."""
        question = "SELECT address, epoch FROM leadership WHERE boot = ? AND until_s > ?"
        found = self._transact(
            lambda rows: rows.execute(question, (self._boot, lease_clock_s())).fetchone(), "DEFERRED"
        )
        return Leader(*found) if found else None

    def close(self) -> None:
        """As ``Coordination.close``."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _transact(self, work: Callable[[sqlite3.Connection], Result], kind: str = "IMMEDIATE") -> Result:
        with self._lock:
            try:
                rows = self._open()
                rows.execute(f"BEGIN {kind}")
                try:
                    result = work(rows)
                except BaseException:
                    rows.execute("ROLLBACK")
                    raise
                rows.execute("COMMIT")
                return result
            except sqlite3.Error as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                raise CoordinationUnavailable(
                    f"cluster {self.where} cannot be used ({error}); check that the folder is there, can be "
                    "written to, and is on a disk of this machine"
                ) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = sqlite3.connect(
                self._file, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
            )
            # An epoch that was given must not be given again after a power cut.
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(SCHEMA)
        return self._connection
