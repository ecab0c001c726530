"""The process group: what torch.distributed calls, and who is in it."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mooncake_ep.pg.collectives import Collectives
from mooncake_ep.pg.engine import GroupEngine, GroupResult
from mooncake_ep.pg.messages import Messages
from mooncake_ep.pg.options import MooncakeBackendOptions
from mooncake_ep.pg.types import Staged
from mooncake_ep.pg.work import CollectiveWork, DoneWork, GroupWork, MessageWork, SequenceWork

__all__ = ["MooncakeProcessGroup"]


_TorchGroup: Any = dist.ProcessGroup  # torch's types are those of its C++ methods, not of what Python calls


class MooncakeProcessGroup(Collectives, Messages, _TorchGroup):  # type: ignore[misc]
    """A `torch.distributed` process group whose ranks may die, pause, come back and arrive at any time.

    Made by `init_process_group("mooncake")` or `new_group`. Each operation ends on all surviving ranks with
    the same contributors and equal results; who has not contributed is out of the group from then on. For
    one thread's collectives; messages may come from others.
    """

    def __init__(
        self,
        engine: GroupEngine,
        rank: int,
        size: int,
        options: MooncakeBackendOptions,
        timeout: timedelta,
        name: str,
    ) -> None:
        super().__init__(rank, size)
        self.engine = engine
        self.options = options
        self.timeout_s = timeout.total_seconds()
        self._rank = rank
        self._size = size
        self._backend_name = name
        self._name = ""
        self._desc = "undefined"
        self._members: list[int] = engine.members
        self._done = DoneWork([])
        self._in_flight: collections.deque[CollectiveWork] = collections.deque()
        self._coalesced: list[GroupWork] | None = None
        self._messages: list[MessageWork] = []
        self._sequence = 0
        self.abandoned: list[torch.Tensor] = []
        self._show_members()

    # Names and sizes. torch's C++ calls the getX forms.

    def getBackendName(self) -> str:
        """Return the name that the group was made under."""
        return self._backend_name

    name = getBackendName
    _get_backend_name = getBackendName

    def getRank(self) -> int:
        """Return this process's rank in the group."""
        return self._rank

    rank = getRank

    def getSize(self) -> int:
        """Return the highest rank there has been, plus one: a rank that is out leaves a hole."""
        return self._size

    size = getSize

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set torch's name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set torch's description of the group."""
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _get_backend(self, device: torch.device) -> MooncakeProcessGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # Members.

    @property
    def members(self) -> list[int]:
        """Ranks that are in the group, ascending, as of the last operation that ended here."""
        return list(self._members)

    def note(self, result: GroupResult | None) -> list[int]:
        """Take over what an operation found of the members; return those that are out since it began."""
        if result is None:
            return []
        before, self._members = self._members, self.engine.members
        self._show_members()
        return [rank for rank in before if rank not in self._members]

    def note_failed(self, ranks: Sequence[int]) -> None:
        """Show ranks as inactive that a message found gone; the next collective makes it so for all."""
        flags = self.options.active_ranks
        for rank in ranks:
            if flags is not None and rank < flags.numel():
                flags[rank] = 0

    def resize(self, size: int) -> None:
        """Let the group have `size` places from now on, and torch know of it."""
        self._size = max(size, self._size)
        known = distributed_c10d._world.pg_group_ranks.get(self)
        if known is not None:
            for rank in range(self._size):
                known.setdefault(rank, rank)

    def take_members(self) -> None:
        """Take over the members after a change of them, and grow to hold them."""
        self._members = self.engine.members
        self.resize(max(self._members) + 1)
        self._show_members()

    def _show_members(self) -> None:
        flags = self.options.active_ranks
        if flags is None or not self.engine.joined:
            return
        active = torch.zeros(flags.numel(), dtype=flags.dtype)
        active[[rank for rank in self._members if rank < flags.numel()]] = 1
        flags.copy_(active)

    # Running what collectives.py asks for.

    def _timeout_of(self, opts: Any) -> float:
        timeout = None if opts is None else opts.timeout
        # Negative is what torch has for "not given".
        if timeout is None or timeout.days < 0:
            return self.timeout_s
        return float(timeout.total_seconds()) or self.timeout_s

    def _run(
        self,
        call: Callable[..., Any],
        arguments: tuple[Any, ...],
        opts: Any,
        outputs: Sequence[torch.Tensor],
        staged: Staged | None = None,
        kept: Any = None,
    ) -> GroupWork:
        """Call the engine now, or have it called: `asyncOp` of torch's options, True where there are none."""
        queued = getattr(opts, "asyncOp", True)
        self._sequence += 1
        ended = call(*arguments, self._timeout_of(opts), queued)
        if ended is None and staged is None and self._coalesced is None:
            return self._done
        finish = staged.finish if staged is not None and staged.pending else None
        work: GroupWork
        if queued:
            work = CollectiveWork(self, ended, outputs, (kept, staged, outputs), finish)
            self._keep(work)
        elif ended is None and finish is None:
            work = self._done
        else:
            work = DoneWork(outputs, self.note(ended))
            work.take(ended)
            if work.error is None and finish is not None:
                finish()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _keep(self, work: CollectiveWork) -> None:
        """Keep tensors of a work that nobody holds until it has ended."""
        while self._in_flight and self._in_flight[0].is_completed():
            self._in_flight.popleft()
        self._in_flight.append(work)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> GroupWork:
        works, self._coalesced = self._coalesced or [], None
        return SequenceWork(works, [output for work in works for output in work.outputs])

    def shutdown(self) -> None:
        """Leave the group and end its threads. What is under way does not end."""
        self.engine.close()

    abort = shutdown
