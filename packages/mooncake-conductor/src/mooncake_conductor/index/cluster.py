"""The prefix indexes of a cluster: one for every pair of model and block size."""

from __future__ import annotations

from collections.abc import Sequence

from mooncake_conductor.index.prefix import PrefixIndex
from mooncake_store.keys import root_digest
from mooncake_store.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

__all__ = ["ClusterIndex"]


class ClusterIndex:
    """Which worker of which model holds which prefix. Pure; not thread-safe.

    Attributes:
        left_out: stores that were not taken in because they are not prefixes of plain prompts.
    """

    def __init__(self) -> None:
        self._indexes: dict[tuple[str, int], PrefixIndex] = {}
        self._index_of: dict[str, PrefixIndex] = {}
        self.left_out = 0

    def attach(self, worker: str, model: str, block_tokens: int) -> None:
        """Events of the worker are about this model from now on. It starts with nothing."""
        self.detach(worker)
        key = (model, block_tokens)
        if key not in self._indexes:
            root = root_digest(model, block_tokens, layout="conductor")
            self._indexes[key] = PrefixIndex(block_tokens, root)
        self._index_of[worker] = self._indexes[key]

    def detach(self, worker: str) -> None:
        """Forget the worker and all it holds."""
        index = self._index_of.pop(worker, None)
        if index is not None:
            index.drop(worker)

    def clear(self, worker: str) -> None:
        """Forget what the worker holds."""
        index = self._index_of.get(worker)
        if index is not None:
            index.clear(worker)

    def apply(self, worker: str, batch: EventBatch) -> None:
        """Take in a batch of an attached worker; others are ignored. Raises EventMalformed, part of it may be
        in."""
        index = self._index_of.get(worker)
        if index is None:
            return
        for event in batch.events:
            if isinstance(event, BlockStored):
                self.left_out += not index.stored(worker, event)
            elif isinstance(event, BlockRemoved):
                index.removed(worker, event)
            elif isinstance(event, AllBlocksCleared):
                index.clear(worker)

    def match(self, model: str, token_ids: Sequence[int]) -> dict[str, int]:
        """For each worker of the model: how many leading tokens of the prompt it holds, in whole blocks.
        Workers that hold nothing of it are not in the result."""
        matched: dict[str, int] = {}
        for (name, _), index in self._indexes.items():
            if name == model:
                matched.update(index.match_tokens(token_ids))
        return matched

    def block_count(self, worker: str) -> int:
        """Distinct prefix blocks that the worker holds."""
        index = self._index_of.get(worker)
        return 0 if index is None else index.block_count(worker)
