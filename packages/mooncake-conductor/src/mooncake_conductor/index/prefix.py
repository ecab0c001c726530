"""Exact prefix index of the workers that share one model and one block size. Pure: no sockets, no clock.

Engines name blocks by hashes of their own making, which need not agree between workers. So every block gets a
digest computed here from its tokens and its parent's digest; the digest names the whole prefix, and one table
from digest to the set of holders (a bit mask) answers how far each worker's cache covers a prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from mooncake_store.errors import EventMalformed
from mooncake_store.keys import block_digests
from mooncake_store.kv_events.wire import MEDIUM_GPU, BlockHash, BlockRemoved, BlockStored

__all__ = ["PrefixIndex"]

# Blocks whose parent is unknown, per worker; the oldest are forgotten, which can only make a match shorter.
WAITING_LIMIT = 65_536
# Names this long are hashes of the content, so that workers that use the same name mean the same prefix.
CONTENT_HASH_BYTES = 16


class _Block:
    """One block of one worker. ``tokens`` is kept only until the digest is known."""

    __slots__ = ("copies", "digest", "parent", "tokens")

    def __init__(self, parent: BlockHash | None, tokens: Sequence[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest: bytes | None = None
        self.copies: dict[str, int] = {}  # by medium


class _View:
    """What one worker holds."""

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.blocks: dict[BlockHash, _Block] = {}
        self.names: dict[bytes, int] = {}  # digest -> how many block names stand for it
        self.waiting: dict[BlockHash, None] = {}  # without a digest yet, oldest first
        self.children: defaultdict[BlockHash, dict[BlockHash, None]] = defaultdict(
            dict
        )  # unknown parent -> waiting


class PrefixIndex:
    """Who holds which blocks.

    Promises: after any sequence of events, ``match`` gives for every worker the number of leading blocks of a
    prompt that it holds right now, counting stores and removals per block and medium. A block that came
    before its parent counts as soon as the parent is there; a removed block in the middle (a hole) ends the
    match until it is back.

    Args:
        block_tokens: tokens in a block.
        root: digest every prompt starts from, ``mooncake_store.keys.root_digest``.
    """

    def __init__(self, block_tokens: int, root: bytes) -> None:
        self.block_tokens = block_tokens
        self._root = root
        self._views: dict[str, _View] = {}
        self._holders: dict[bytes, int] = {}

    def stored(self, worker: str, event: BlockStored) -> bool:
        """Take in a store. False when the blocks are not prefixes of plain prompts of this index (other block
        size, adapter, images, another cache group) and were left out. Raises EventMalformed when it
        contradicts itself."""
        if event.block_size != self.block_tokens or not _is_plain(event):
            return False
        size = self.block_tokens
        if len(event.token_ids) != size * len(event.block_hashes):
            raise EventMalformed(
                f"BlockStored of {len(event.block_hashes)} blocks of {size} has {len(event.token_ids)} tokens"
            )
        view = self._view(worker)
        parent = event.parent_block_hash
        start = self._root if parent is None else self._digest_of(view, parent)
        digests: Sequence[bytes | None] = (
            [None] * len(event.block_hashes) if start is None else block_digests(event.token_ids, size, start)
        )
        for position, (name, digest) in enumerate(zip(event.block_hashes, digests, strict=True)):
            tokens = event.token_ids[position * size : (position + 1) * size]
            block = self._place(view, name, parent, tokens, digest)
            medium = event.medium or MEDIUM_GPU
            block.copies[medium] = block.copies.get(medium, 0) + 1
            parent = name
        self._limit_waiting(view)
        return True

    def removed(self, worker: str, event: BlockRemoved) -> None:
        """Take in a removal. Blocks that are not known are passed over."""
        if event.group_idx:
            return
        view = self._view(worker)
        medium = event.medium or MEDIUM_GPU
        for name in event.block_hashes:
            block = view.blocks.get(name)
            if block is None or medium not in block.copies:
                continue
            block.copies[medium] -= 1
            if block.copies[medium] == 0:
                del block.copies[medium]
            if not block.copies:
                self._forget(view, name)

    def clear(self, worker: str) -> None:
        """The worker holds nothing."""
        view = self._views.get(worker)
        if view is None:
            return
        for digest in view.names:
            self._unmark(digest, view.bit)
        self._views[worker] = _View(view.bit)

    def drop(self, worker: str) -> None:
        """Forget the worker itself. Its place is free for another one."""
        self.clear(worker)
        self._views.pop(worker, None)

    def match(self, digests: Iterable[bytes]) -> dict[str, int]:
        """For each worker that holds the first block: how many leading blocks it holds."""
        depths: dict[str, int] = {}
        alive = -1
        depth = 0
        for digest in digests:
            holding = self._holders.get(digest, 0) & alive
            if holding != alive and depth:
                self._note(depths, alive & ~holding, depth)
            alive = holding
            if not alive:
                return depths
            depth += 1
        if depth:
            self._note(depths, alive, depth)
        return depths

    def match_tokens(self, token_ids: Sequence[int]) -> dict[str, int]:
        """As ``match``, from the tokens of a prompt; the result is in tokens."""
        blocks = self.match(block_digests(token_ids, self.block_tokens, self._root))
        return {worker: depth * self.block_tokens for worker, depth in blocks.items()}

    def block_count(self, worker: str) -> int:
        """Distinct prefix blocks that the worker holds and whose whole prefix is known."""
        view = self._views.get(worker)
        return 0 if view is None else len(view.names)

    def _note(self, depths: dict[str, int], mask: int, depth: int) -> None:
        if mask:
            depths.update({worker: depth for worker, view in self._views.items() if view.bit & mask})

    def _view(self, worker: str) -> _View:
        view = self._views.get(worker)
        if view is None:
            used = sum(other.bit for other in self._views.values())
            view = self._views[worker] = _View(~used & (used + 1))  # the lowest bit nobody has
        return view

    def _digest_of(self, view: _View, name: BlockHash) -> bytes | None:
        block = view.blocks.get(name)
        if block is not None and block.digest is not None:
            return block.digest
        if not _names_content(name):
            return None
        # The parent may lie in another worker's part of a shared store.
        for other in self._views.values():
            block = other.blocks.get(name)
            if block is not None and block.digest is not None:
                return block.digest
        return None

    def _place(
        self,
        view: _View,
        name: BlockHash,
        parent: BlockHash | None,
        tokens: Sequence[int],
        digest: bytes | None,
    ) -> _Block:
        block = view.blocks.get(name)
        if block is not None and digest is not None and block.digest not in (None, digest):
            # The engine uses the name for other content now: the removal in between was lost.
            self._forget(view, name)
            block = None
        if block is None:
            block = view.blocks[name] = _Block(parent, tokens)
            if digest is None:
                assert parent is not None, "a block without a parent always has a digest"
                view.waiting[name] = None
                view.children[parent][name] = None
        if digest is not None and block.digest is None:
            self._resolve(view, name, digest)
        return block

    def _resolve(self, view: _View, name: BlockHash, digest: bytes) -> None:
        """Give a block its digest, and so everything that waited for it, in other views too if the name is
        shared."""
        todo = [(view, name, digest)]
        while todo:
            owner, name, digest = todo.pop()
            block = owner.blocks[name]
            if block.digest is not None:
                continue
            self._stop_waiting(owner, name)
            block.digest = digest
            block.tokens = ()
            owner.names[digest] = owner.names.get(digest, 0) + 1
            self._holders[digest] = self._holders.get(digest, 0) | owner.bit
            for other in self._views.values() if _names_content(name) else (owner,):
                for child in other.children.get(name, ()):
                    tokens = other.blocks[child].tokens
                    todo.append((other, child, block_digests(tokens, self.block_tokens, digest)[0]))

    def _stop_waiting(self, view: _View, name: BlockHash) -> None:
        if name not in view.waiting:
            return
        del view.waiting[name]
        parent = view.blocks[name].parent
        assert parent is not None
        siblings = view.children[parent]
        del siblings[name]
        if not siblings:
            del view.children[parent]

    def _forget(self, view: _View, name: BlockHash) -> None:
        self._stop_waiting(view, name)
        digest = view.blocks.pop(name).digest
        if digest is None:
            return
        view.names[digest] -= 1
        if view.names[digest] == 0:
            del view.names[digest]
            self._unmark(digest, view.bit)

    def _unmark(self, digest: bytes, bit: int) -> None:
        left = self._holders[digest] & ~bit
        if left:
            self._holders[digest] = left
        else:
            del self._holders[digest]

    def _limit_waiting(self, view: _View) -> None:
        while len(view.waiting) > WAITING_LIMIT:
            self._forget(view, next(iter(view.waiting)))


def _is_plain(event: BlockStored) -> bool:
    extras = event.extra_keys or ()
    return event.lora_id is None and not event.lora_name and not event.group_idx and not any(extras)


def _names_content(name: BlockHash) -> bool:
    return isinstance(name, bytes) and len(name) >= CONTENT_HASH_BYTES
