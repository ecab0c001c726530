"""What the process group asks of an engine: the compiled one of a host, or the one between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

__all__ = ["GroupEngine", "GroupResult"]

Span = tuple[int, int]  # address and bytes


class GroupResult(Protocol):
    """How an operation ended; see core/pg/result.hpp for the codes."""

    @property
    def code(self) -> int:
        """Why it ended; 0 and 1: well."""

    @property
    def reason(self) -> str:
        """What went wrong."""

    @property
    def contributors(self) -> list[int]:
        """Ranks whose part is in the result."""

    @property
    def source(self) -> int:
        """The sender of a message."""


class GroupEngine(Protocol):
    """One rank of a group.

    Collectives take addresses, a timeout, and whether to queue: then they return a ticket for `finish`.
    Otherwise they return None when every member contributed, or a GroupResult.
    """

    def all_reduce(
        self, data: int, count: int, type: int, op: int, factor: float, timeout_s: float, queued: bool
    ) -> Any:
        """Reduce in place."""

    def reduce_to(
        self,
        root: int,
        data: int,
        count: int,
        type: int,
        op: int,
        factor: float,
        timeout_s: float,
        queued: bool,
    ) -> Any:
        """Reduce to the root, in place."""

    def reduce_scatter(
        self,
        out: int,
        inputs: Sequence[Span],
        type: int,
        op: int,
        factor: float,
        timeout_s: float,
        queued: bool,
    ) -> Any:
        """Reduce `inputs[rank]` to each rank."""

    def all_gather(self, outs: Sequence[Span], data: int, nbytes: int, timeout_s: float, queued: bool) -> Any:
        """Collect from all."""

    def all_gather_even(
        self, out: int, ranks: int, data: int, nbytes: int, timeout_s: float, queued: bool
    ) -> Any:
        """Collect from all, one behind the other."""

    def gather(
        self, root: int, outs: Sequence[Span], data: int, nbytes: int, timeout_s: float, queued: bool
    ) -> Any:
        """Collect at the root."""

    def broadcast(self, root: int, data: int, nbytes: int, timeout_s: float, queued: bool) -> Any:
        """Copy the root's data to all."""

    def scatter(
        self, root: int, out: int, nbytes: int, inputs: Sequence[Span], timeout_s: float, queued: bool
    ) -> Any:
        """Give each rank one of the root's inputs."""

    def all_to_all(self, outs: Sequence[Span], inputs: Sequence[Span], timeout_s: float, queued: bool) -> Any:
        """Give `inputs[rank]` to each rank."""

    def barrier(self, timeout_s: float, queued: bool) -> Any:
        """Wait for all."""

    def done(self, ticket: int) -> bool:
        """Whether a queued collective has ended."""

    def finish(self, ticket: int, timeout_s: float) -> Any:
        """Wait for the end of a queued collective."""

    def send(self, to: int, data: int, nbytes: int, tag: int) -> int:
        """Begin to send; returns the message's number."""

    def receive(self, source: int, data: int, nbytes: int, tag: int) -> int:
        """Begin to receive; returns the message's number."""

    def message_done(self, number: int) -> bool:
        """Whether a message has ended."""

    def finish_message(self, number: int, timeout_s: float) -> Any:
        """Wait for the end of a message."""

    def move_messages_aside(self) -> None:
        """Have messages move while the caller does something else."""

    def waits(self, rank: int) -> bool:
        """Whether somebody waits to be let in as a rank."""

    def gone(self, rank: int) -> bool:
        """Whether a rank can no longer answer."""

    def found(self, ranks: Sequence[int], timeout_s: float) -> GroupResult:
        """The first operation of the first members."""

    def admit(self, ranks: Sequence[int], timeout_s: float) -> GroupResult:
        """Let ranks in."""

    def expel(self, ranks: Sequence[int], timeout_s: float) -> GroupResult:
        """Take ranks out."""

    def join(self, timeout_s: float) -> GroupResult:
        """Wait to be let in."""

    def plan_fault(self, point: int, nth: int, kill: bool) -> None:
        """Plan a fault."""

    def close(self) -> None:
        """Leave the group."""

    @property
    def members(self) -> list[int]:
        """Ranks that are in the group."""

    @property
    def joined(self) -> bool:
        """Whether this process has ever been let in."""

    @property
    def capacity(self) -> int:
        """How many ranks there may be."""
