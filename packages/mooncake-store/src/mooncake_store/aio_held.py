"""What an asynchronous store hands out and holds a lease or a reservation: its calls are awaited, too."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from mooncake_store.buffers import ValueBuffer
from mooncake_store.parts import Uints
from mooncake_store.read_session import ReadSession
from mooncake_store.value_reader import ValueReader
from mooncake_store.write_session import WriteSession
from mooncake_transfer import Region

__all__ = ["AsyncReadSession", "AsyncValueBuffer", "AsyncValueReader", "AsyncWriteSession", "Runs"]

R = TypeVar("R")
Kind = type[BaseException] | None


class Runs(Protocol):
    """Runs blocking calls off the event loop: :class:`AsyncStore`."""

    async def run(
        self, call: Callable[[], R], *, undo: Callable[[R], None] | None = None, always: bool = False
    ) -> R:
        """What the call returns. See ``AsyncStore.run``."""
        ...


class AsyncReadSession:
    """A :class:`ReadSession` whose calls are awaited: ``async with await store.read_session(keys)``."""

    def __init__(self, store: Runs, session: ReadSession) -> None:
        self._store, self._session = store, session

    @property
    def found(self) -> npt.NDArray[np.bool_]:
        """See :attr:`ReadSession.found`."""
        return self._session.found

    @property
    def sizes(self) -> Uints:
        """See :attr:`ReadSession.sizes`."""
        return self._session.sizes

    @property
    def good(self) -> npt.NDArray[np.bool_]:
        """See :attr:`ReadSession.good`."""
        return self._session.good

    @property
    def expired(self) -> npt.NDArray[np.bool_]:
        """See :attr:`ReadSession.expired`."""
        return self._session.expired

    async def read_parts(self, memories: Region | Sequence[object], parts: npt.ArrayLike) -> None:
        """See :meth:`ReadSession.read_parts`."""
        await self._store.run(functools.partial(self._session.read_parts, memories, parts))

    async def __aenter__(self) -> AsyncReadSession:
        """See ``ReadSession.__enter__``; a cancelled one keeps no lease."""
        await self._store.run(self._session.__enter__, undo=_left)
        return self

    async def __aexit__(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._store.run(functools.partial(self._session.__exit__, kind, error, trace), always=True)


class AsyncWriteSession:
    """A :class:`WriteSession` whose calls are awaited, as those of :class:`AsyncReadSession`."""

    def __init__(self, store: Runs, session: WriteSession) -> None:
        self._store, self._session = store, session

    @property
    def sizes(self) -> Uints:
        """Bytes of each value."""
        return self._session.sizes

    @property
    def placed(self) -> npt.NDArray[np.bool_]:
        """See :class:`WriteSession`."""
        return self._session.placed

    @property
    def stored(self) -> npt.NDArray[np.bool_]:
        """See :class:`WriteSession`."""
        return self._session.stored

    async def write_parts(self, memories: Region | Sequence[object], parts: npt.ArrayLike) -> None:
        """See :meth:`WriteSession.write_parts`."""
        await self._store.run(functools.partial(self._session.write_parts, memories, parts))

    async def __aenter__(self) -> AsyncWriteSession:
        """See ``WriteSession.__enter__``; a cancelled one keeps no reservation."""
        await self._store.run(self._session.__enter__, undo=_left)
        return self

    async def __aexit__(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._store.run(functools.partial(self._session.__exit__, kind, error, trace), always=True)


class AsyncValueReader:
    """A :class:`ValueReader` whose calls are awaited.

    Attributes:
        nbytes: size of the value.
    """

    def __init__(self, store: Runs, reader: ValueReader) -> None:
        self._store, self._reader = store, reader
        self.nbytes = reader.nbytes

    async def read(self, start: int, nbytes: int) -> bytes:
        """See :meth:`ValueReader.read`."""
        return await self._store.run(functools.partial(self._reader.read, start, nbytes))

    async def close(self) -> None:
        """See :meth:`ValueReader.close`."""
        await self._store.run(self._reader.close, always=True)

    async def give_up(self) -> None:
        """See :meth:`ValueReader.give_up`."""
        await self._store.run(self._reader.give_up, always=True)

    async def __aenter__(self) -> AsyncValueReader:
        return self

    async def __aexit__(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> None:
        await (self.close() if error is None else self.give_up())


class AsyncValueBuffer:
    """A :class:`ValueBuffer` that is closed without holding up the loop; ``async with`` gives the buffer.

    Attributes:
        value: the buffer, to be looked at.
    """

    def __init__(self, store: Runs, value: ValueBuffer) -> None:
        self._store = store
        self.value = value

    @property
    def shared(self) -> bool:
        """See :attr:`ValueBuffer.shared`."""
        return self.value.shared

    @property
    def valid(self) -> bool:
        """See :attr:`ValueBuffer.valid`; asks nobody."""
        return self.value.valid

    async def close(self) -> None:
        """See :meth:`ValueBuffer.close`."""
        await self._store.run(self.value.close, always=True)

    async def __aenter__(self) -> ValueBuffer:
        return self.value

    async def __aexit__(self, kind: Kind, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._store.run(functools.partial(self.value.__exit__, kind, error, trace), always=True)


def _left(session: ReadSession | WriteSession) -> None:
    """Nobody is in the session that was entered."""
    cancelled = asyncio.CancelledError()
    session.__exit__(asyncio.CancelledError, cancelled, None)
