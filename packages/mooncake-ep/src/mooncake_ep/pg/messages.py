"""Messages between two ranks, as torch calls them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from mooncake_ep.pg.engine import GroupEngine
from mooncake_ep.pg.errors import CollectiveMismatch
from mooncake_ep.pg.types import flat, span
from mooncake_ep.pg.work import GroupWork, MessageWork

if TYPE_CHECKING:
    from mooncake_ep.pg.group import MooncakeProcessGroup

__all__ = ["Messages"]

ANY_SOURCE = -1
PRUNE_AT = 32


class Messages:
    """The part of the process group that sends and receives.

    Messages from one rank to another with the same tag arrive in the order of sending. A receive takes a
    message of exactly its size; CollectiveMismatch otherwise.
    """

    engine: GroupEngine
    _size: int
    _coalesced: list[GroupWork] | None
    _messages: list[MessageWork]

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> GroupWork:
        """Send one tensor. A short one is done before its receiver asks. No exception if that is gone."""
        tensor = self._check(tensors, dst, "send")
        memory = tensor if flat(tensor) else tensor.detach().contiguous().cpu()
        number = self.engine.send(dst, *span(memory), tag)
        return self._start(MessageWork(self._group(), number, tensor, memory, dst, receives=False))

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> GroupWork:
        """Receive one tensor; RankFailed when the sender is gone and has not sent it."""
        tensor = self._check(tensors, src, "recv")
        return self._receive(tensor, src, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> GroupWork:
        """Receive one tensor from whoever sends first with this tag."""
        tensor = self._check(tensors, 0, "recv")
        return self._receive(tensor, ANY_SOURCE, tag)

    def _receive(self, tensor: torch.Tensor, src: int, tag: int) -> GroupWork:
        memory = tensor if flat(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)
        number = self.engine.receive(src, *span(memory), tag)
        return self._start(MessageWork(self._group(), number, tensor, memory, src, receives=True))

    def _start(self, work: MessageWork) -> GroupWork:
        self.engine.move_messages_aside()
        if not work.is_completed():
            self._keep_message(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _keep_message(self, work: MessageWork) -> None:
        """Keep the memory of a message that nobody waits for until it has left or come."""
        if len(self._messages) >= PRUNE_AT:
            self._messages[:] = [one for one in self._messages if not one.is_completed()]
        self._messages.append(work)

    def _check(self, tensors: Sequence[torch.Tensor], peer: int, what: str) -> torch.Tensor:
        if len(tensors) != 1:
            raise CollectiveMismatch(f"{what} takes one tensor, not {len(tensors)}")
        if not 0 <= peer < self.engine.capacity:
            raise CollectiveMismatch(
                f"{what} with rank {peer}; ranks go from 0 to {self.engine.capacity - 1}"
            )
        return tensors[0]

    def _group(self) -> MooncakeProcessGroup:
        return cast("MooncakeProcessGroup", self)
