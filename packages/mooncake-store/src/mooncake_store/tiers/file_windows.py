"""Parts of a batch that move together: while one is checked, the others are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from mooncake_store._errors import TierTimeout
from mooncake_store.tiers.buckets import Bucket, Buckets, Entry
from mooncake_store.tiers.codec import BLOCK_BYTES, Codec, Header, decode_header, rounded
from mooncake_store.tiers.contract import Bytes, Record
from mooncake_store.tiers.files import Files, OpenFile, Piece, Running

__all__ = ["IN_FLIGHT_BYTES", "Placed", "ReadWindow", "Window", "WriteWindow", "windows"]

WINDOW_BYTES = 8 << 20
IN_FLIGHT_BYTES = 64 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Placed:
    """A record and where it goes: number in the batch, bucket, offset, bytes from there to the next one."""

    at: int
    record: Record
    bucket: Bucket
    offset: int
    span: int


@dataclass(frozen=True, slots=True)
class Window(Generic[T]):
    """Some of a batch, all in one bucket."""

    items: list[T]
    nbytes: int


def windows(
    items: Sequence[T], nbytes_of: Callable[[T], int], bucket_of: Callable[[T], Bucket]
) -> Iterator[Window[T]]:
    """Cut a batch, in its order, where the bucket changes and where a window is full."""
    held: list[T] = []
    nbytes = 0
    for item in items:
        size = nbytes_of(item)
        if held and (bucket_of(item) is not bucket_of(held[0]) or nbytes + size > WINDOW_BYTES):
            yield Window(held, nbytes)
            held, nbytes = [], 0
        held.append(item)
        nbytes += size
    if held:
        yield Window(held, nbytes)


class _Moving:
    """What reads and writes have in common: the file, and memory for what needs some."""

    def __init__(self, bucket: Bucket, buckets: Buckets, files: Files, nbytes: int) -> None:
        self.bucket = bucket
        self.nbytes = nbytes
        self._buckets = buckets
        self._files = files
        self._stack = ExitStack()
        self._file: OpenFile | None = None
        self._running: Running | None = None
        self._failure: Exception | None = None

    def begin(self, scratch_bytes: int, pieces_of: Callable[[Bytes], list[Piece]], *, write: bool) -> None:
        """Start; what fails here is told by the wait."""
        try:
            self._file = self._buckets.acquire(self.bucket)
            self._stack.callback(self._buckets.release, self.bucket)
            none = np.empty(0, dtype=np.uint8)
            scratch = self._stack.enter_context(self._files.scratch(scratch_bytes)) if scratch_bytes else none
            self._running = self._file.start(pieces_of(scratch), write=write)
        except (OSError, MemoryError, TierTimeout) as error:
            self._failure = error

    def wait(self, deadline_s: float, *, durable: bool = False) -> Exception | None:
        """Until it is done; what went wrong. Call :meth:`end` afterwards."""
        running, self._running = self._running, None
        if running is not None:
            try:
                running.wait(deadline_s)
                if durable and self._file is not None:
                    self._file.sync()
            except (OSError, TierTimeout) as error:
                self._failure = error
        return self._failure

    def end(self) -> None:
        """Let go of file and memory."""
        self._stack.close()


class WriteWindow(_Moving):
    """Records on their way into one bucket. ``headers``: theirs, in order."""

    def __init__(
        self, items: list[Placed], nbytes: int, buckets: Buckets, files: Files, codec: Codec
    ) -> None:
        super().__init__(items[0].bucket, buckets, files, nbytes)
        self.items = items
        self.headers: list[Header] = []
        self._codec = codec
        needs = [self._scratch_bytes(one) for one in items]
        self.begin(sum(needs), self._pieces, write=True)

    def _scratch_bytes(self, one: Placed) -> int:
        size = one.record.value.nbytes
        if self._codec.copies:
            return one.span
        return one.span - rounded(size) + (BLOCK_BYTES if size % BLOCK_BYTES else 0)

    def _pieces(self, scratch: Bytes) -> list[Piece]:
        pieces, at = [], 0
        for one in self.items:
            part = scratch[at : at + self._scratch_bytes(one)]
            at += part.nbytes
            pieces += self._pieces_of(one, part)
        return pieces

    def _pieces_of(self, one: Placed, part: Bytes) -> list[Piece]:
        value = one.record.value
        head_bytes = self._codec.header_bytes(one.record)
        packed, stored = self._codec.seal(one.record, one.bucket.place, one.offset, part[head_bytes:])
        part[:head_bytes] = memoryview(packed)
        self.headers.append(decode_header(packed))
        if self._codec.copies:
            part[head_bytes + stored.nbytes :] = 0
            return [Piece(one.offset, part)]
        whole = value.nbytes - value.nbytes % BLOCK_BYTES
        pieces = [Piece(one.offset, part[:head_bytes])]
        if whole:
            pieces.append(Piece(one.offset + head_bytes, value[:whole]))
        if whole < value.nbytes:
            tail = part[head_bytes:]
            tail[: value.nbytes - whole] = value[whole:]
            tail[value.nbytes - whole :] = 0
            pieces.append(Piece(one.offset + head_bytes + whole, tail))
        return pieces


class ReadWindow(_Moving):
    """Values on their way from one bucket."""

    def __init__(
        self,
        items: list[tuple[int, Entry, Bytes]],
        nbytes: int,
        buckets: Buckets,
        files: Files,
        codec: Codec,
    ) -> None:
        super().__init__(items[0][1].bucket, buckets, files, nbytes)
        self.items = items
        self._codec = codec
        self._parts: dict[int, Bytes] = {}
        self.begin(sum(self._scratch_bytes(entry.header) for _, entry, _ in items), self._pieces, write=False)

    @staticmethod
    def _scratch_bytes(header: Header) -> int:
        if header.encrypted:
            return rounded(header.stored_bytes)
        return BLOCK_BYTES if header.stored_bytes % BLOCK_BYTES else 0

    def _pieces(self, scratch: Bytes) -> list[Piece]:
        pieces, at = [], 0
        for number, entry, into in self.items:
            header = entry.header
            part = scratch[at : at + self._scratch_bytes(header)]
            at += part.nbytes
            self._parts[number] = part
            start = header.offset + header.nbytes
            whole = 0 if header.encrypted else header.stored_bytes - header.stored_bytes % BLOCK_BYTES
            if whole:
                pieces.append(Piece(start, into[:whole]))
            if part.nbytes:
                pieces.append(Piece(start + whole, part))
        return pieces

    def check(self) -> list[bool]:
        """Of each value that was to arrive, whether it has, as it was written."""
        return [self._is_good(item) for item in self.items]

    def _is_good(self, item: tuple[int, Entry, Bytes]) -> bool:
        number, entry, into = item
        header, part = entry.header, self._parts[number]
        if header.encrypted:
            return self._codec.open(header, entry.stored.meta.tenant, part[: header.stored_bytes], into)
        rest = header.stored_bytes % BLOCK_BYTES
        if rest:
            into[header.stored_bytes - rest :] = part[:rest]
        return self._codec.open(header, entry.stored.meta.tenant, into, into)
