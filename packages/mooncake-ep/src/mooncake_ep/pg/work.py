"""Work objects: collectives and messages under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from mooncake_ep.pg.completer import complete_later
from mooncake_ep.pg.errors import (
    CollectiveMismatch,
    GroupError,
    GroupTimeout,
    GroupUnavailable,
    RankEvicted,
    RankFailed,
)

if TYPE_CHECKING:
    from mooncake_ep.pg.engine import GroupResult
    from mooncake_ep.pg.group import MooncakeProcessGroup

__all__ = ["CollectiveWork", "DoneWork", "GroupWork", "MessageWork", "SequenceWork", "error_of"]

_TIMEOUT, _INTERRUPTED = 5, 6
_ERRORS: dict[int, type[GroupError]] = {
    2: RankEvicted,
    3: RankFailed,
    4: CollectiveMismatch,
    5: GroupTimeout,
    6: GroupTimeout,
    7: GroupUnavailable,
    8: GroupUnavailable,
}


def error_of(result: GroupResult) -> GroupError | None:
    """Return the exception that an operation's end stands for, if any."""
    kind = _ERRORS.get(result.code)
    return None if kind is None else kind(result.reason)


def seconds(timeout: timedelta | float | None) -> float:
    """Return a timeout of torch in seconds; -1 is none, which torch also says by zero."""
    if timeout is None:
        return -1.0
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return value if value > 0 else -1.0


class GroupWork(Work):
    """An operation of a process group, with what torch's own Work offers.

    `failed_ranks`: members at its beginning that were out at its end. `contributors`: the ranks whose part
    is in the result, the same on all survivors; None stands for every member. A rank that fails after it gave
    its part is in both. `local_success`: whether what this rank was to get or to give went through.
    """

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.failed_ranks: list[int] = []
        self.contributors: list[int] | None = None
        self.error: GroupError | None = None
        self.source = -1
        self._future: Any = None
        self._lock = threading.Lock()
        self._ended = False

    @property
    def local_success(self) -> bool:
        """Waits for the end; False if this rank's part failed."""
        self.join()
        return self.error is None

    def join(self, timeout: timedelta | float | None = None) -> None:
        """Wait for the end without raising its error. Raises GroupTimeout when it has not come in time."""
        if self._ended:
            return
        limit_s, began_s = seconds(timeout), time.monotonic()
        # Who waits already, perhaps for longer, ends it for all.
        if not self._lock.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
            raise GroupTimeout(
                f"the operation did not end within {limit_s:g} s, for which somebody else waits, too"
            )
        try:
            if not self._ended:
                left_s = limit_s if limit_s < 0 else max(1e-3, limit_s - (time.monotonic() - began_s))
                self._finish(left_s)
                self._ended = True
        finally:
            self._lock.release()

    def take(self, result: GroupResult | None) -> None:
        """Take over how it ended."""
        if result is not None:
            self.error = error_of(result)
            self.contributors = result.contributors if self.error is None else []

    def _finish(self, timeout_s: float) -> None:
        raise NotImplementedError

    def _is_done(self) -> bool:
        raise NotImplementedError

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for the end. True when done; raises what went wrong, GroupTimeout if it is not over."""
        self.join(timeout)
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        if not self._ended and self._is_done():
            self.join()
        return self._ended

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.error is None

    def exception(self) -> GroupError | None:
        """Return what went wrong, if it has ended."""
        return self.error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it wrote, after waiting."""
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """Return the sender of a received message."""
        self.join()
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a `torch.futures.Future` of `result()`."""
        if self._future is None:
            future: Any = torch.futures.Future()
            self._future = future
            if self._ended:
                self._settle(future)
            else:
                complete_later(lambda: self._settle(future))
        return self._future

    def _settle(self, future: Any) -> None:
        try:
            self.wait()
        except GroupError as error:
            future.set_exception(error)
        else:
            future.set_result(self.outputs)


class DoneWork(GroupWork):
    """What ended before its call returned."""

    def __init__(self, outputs: Sequence[torch.Tensor], failed_ranks: Sequence[int] = ()) -> None:
        super().__init__(outputs)
        self.failed_ranks = list(failed_ranks)
        self._ended = True


class CollectiveWork(GroupWork):
    """A collective that the group runs in the order of the calls."""

    def __init__(
        self,
        group: MooncakeProcessGroup,
        ticket: int,
        outputs: Sequence[torch.Tensor],
        kept: Any,
        finish: Callable[[], None] | None,
    ) -> None:
        super().__init__(outputs)
        self._group = group
        self._ticket = ticket
        self._kept = kept
        self._copy_back = finish

    def _finish(self, timeout_s: float) -> None:
        result: Any = self._group.engine.finish(self._ticket, timeout_s)
        if result is not None and result.code in (_TIMEOUT, _INTERRUPTED):
            raise GroupTimeout(result.reason)
        self.failed_ranks = self._group.note(result)
        self.take(result)
        if self.error is None and self._copy_back is not None:
            self._copy_back()
        self._kept = self._copy_back = None

    def _is_done(self) -> bool:
        return bool(self._group.engine.done(self._ticket))


class MessageWork(GroupWork):
    """A message that is sent or received. A send to a rank that is gone ends without an exception.

    One that is not over in time is taken back, unless part of it has left already.
    """

    def __init__(
        self,
        group: MooncakeProcessGroup,
        number: int,
        tensor: torch.Tensor,
        memory: torch.Tensor,
        peer: int,
        *,
        receives: bool,
    ) -> None:
        super().__init__([tensor])
        self._group = group
        self._number = number
        self._memory = memory
        self._peer = peer
        self._receives = receives
        self._lost: GroupError | None = None

    @property
    def local_success(self) -> bool:
        """Waits for the end; False if the message did not go through."""
        self.join()
        return self.error is None and self._lost is None

    def _finish(self, timeout_s: float) -> None:
        limit = timeout_s if timeout_s > 0 else self._group.timeout_s
        result: Any = self._group.engine.finish_message(self._number, limit)
        self.source = result.source
        error = error_of(result)
        if isinstance(error, GroupTimeout):
            self._group.abandoned.append(self._memory)  # what has begun to leave is still read
        if isinstance(error, RankFailed):
            self.failed_ranks = [self._peer] if self._peer >= 0 else []
            self._group.note_failed(self.failed_ranks)
        if isinstance(error, RankFailed) and not self._receives:
            self._lost = error
        else:
            self.error = error
        if error is None and self._receives and self._memory is not self.outputs[0]:
            self.outputs[0].copy_(self._memory)

    def _is_done(self) -> bool:
        return bool(self._group.engine.message_done(self._number))


class SequenceWork(GroupWork):
    """Several operations as one."""

    def __init__(self, works: Sequence[GroupWork], outputs: Sequence[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._works = list(works)

    def _finish(self, timeout_s: float) -> None:
        for work in self._works:
            work.join(timeout_s)
        self.failed_ranks = sorted({rank for work in self._works for rank in work.failed_ranks})
        self.error = next((work.error for work in self._works if work.error is not None), None)

    def _is_done(self) -> bool:
        return all(work.is_completed() for work in self._works)
