"""Rounds of one kind, dispatches or combines: who may write when, and when what was written may be read.

A round has a number, which all ranks count alike. Its bytes go to one of two regions of the writer's window,
in turns; a region is written again only after every rank that is still there has read it.
"""

from __future__ import annotations

import ctypes
import time

from mooncake_ep.exchange.peers import HEAD_BYTES, META_BYTES, MOST_RANKS, POSTED_WORDS, REGION_BYTES, Peers

__all__ = ["COMBINE", "DISPATCH", "Channel"]

DISPATCH, COMBINE = 0, 1
# WRITING of the first channel; the second has the one after the next, behind its POSTED word.
WRITING = 3
FIRST_READ = 16
HEADER_BYTES = 128


class Channel:
    """One side of all rounds of one kind."""

    def __init__(self, peers: Peers, kind: int) -> None:
        self.peers = peers
        self._kind = kind
        self._posted, self._writing = POSTED_WORDS[kind], WRITING + 2 * kind
        self._read = FIRST_READ + kind * MOST_RANKS
        self.restart()

    def restart(self) -> None:
        """Begin with the number that the ranks agreed on when they met."""
        self.round = self._claimed = self.peers.rounds

    def region(self, number: int) -> int:
        """Where the region of a round begins in a window: header, then further tables, then rows."""
        return HEAD_BYTES + (2 * self._kind + number % 2) * REGION_BYTES

    def rows(self, number: int) -> int:
        """Where the rows of a round begin in a window."""
        return self.region(number) + META_BYTES

    def header(self, rank: int, number: int) -> ctypes.Array[ctypes.c_int64]:
        """What the writer says of a round."""
        return self.peers.header(rank, self.region(number))

    def tables(self, number: int) -> int:
        """Where tables that follow the header begin."""
        return self.region(number) + HEADER_BYTES

    def claim(self, deadline_ns: int) -> int:
        """Make sure that the next round's region can be written, and return its number.

        Raises PeerError when the others have given this rank up.
        """
        number = self.round + 1
        if self._claimed == number:
            return number
        self.peers.require_membership()
        read = self._read + self.peers.rank
        for rank in range(self.peers.size):
            if rank == self.peers.rank or not self.peers.alive[rank]:
                continue
            if not self.peers.wait(rank, read, number - 2, deadline_ns):
                self.peers.give_up(rank)  # and what it has posted before is read all the same
        self.peers.window.store(self._writing, number)
        self._claimed = number
        return number

    def post(self) -> int:
        """Show what was written since the claim to all ranks; returns the number of the round.

        Raises PeerError when the others have given this rank up.
        """
        self.round += 1
        self.peers.rounds = max(self.peers.rounds, self.round)
        if not self.peers.window.post(self._posted, self.round):
            self.peers.refuse()
        return self.round

    def wait(self, rank: int, number: int, deadline_ns: int, waits_us: list[int] | None = None) -> bool:
        """Wait for what a rank posts in a round; False when it is gone or took too long.

        `waits_us` [ranks] is increased by how long that took.
        """
        began = time.monotonic_ns()
        came = self.peers.expect(rank, self._posted, number, deadline_ns)
        if waits_us is not None:
            waits_us[rank] += (time.monotonic_ns() - began) // 1000
        return came

    def is_intact(self, rank: int, number: int) -> bool:
        """Whether what was read just now was still that round's.

        It is not when this rank was so late that the writer gave it up and went on.
        """
        if self.peers.window_of(rank).load(self._writing) <= number + 1:
            return True
        self.peers.alive[rank] = False
        return False

    def finish_all(self, number: int) -> None:
        """Tell all ranks that this one will not read a round any more, whether it has read theirs or not.

        Raises PeerError when the others have given this rank up, so that what it read may be wrong.
        """
        for rank in range(self.peers.size):
            self.peers.window.store(self._read + rank, number)
        self.peers.require_membership()
