"""The store for asyncio: every call of :class:`Store`, awaited."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from mooncake_store._errors import ConfigError, StoreClosed
from mooncake_store.aio_held import (
    AsyncReadSession,
    AsyncValueBuffer,
    AsyncValueReader,
    AsyncWriteSession,
    Runs,
)
from mooncake_store.buffers import ValueBuffer
from mooncake_store.client import Store
from mooncake_store.config import StoreConfig
from mooncake_store.master import Master
from mooncake_store.tiers.contract import Tier
from mooncake_store.value_reader import ValueReader
from mooncake_transfer import Region, TransferEngine

__all__ = ["AsyncStore"]

DEFAULT_THREADS = 8
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def _twin(
    call: Callable[Concatenate[Store, P], R], undo: Callable[[R], None] | None = None
) -> Callable[Concatenate[AsyncStore, P], Coroutine[object, object, R]]:
    """Return the same call as a coroutine, with its parameters and its promises."""

    @functools.wraps(call)
    async def awaited(self: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.run(functools.partial(call, self.store, *args, **kwargs), undo=undo)

    return awaited


def _handing_out(
    call: Callable[Concatenate[Store, P], R],
    wrap: Callable[[Runs, R], S],
    undo: Callable[[R], None] | None = None,
) -> Callable[Concatenate[AsyncStore, P], Coroutine[object, object, S]]:
    """As :func:`_twin`, of a call whose result has calls that are to be awaited, too."""

    @functools.wraps(call)
    async def awaited(self: AsyncStore, /, *args: P.args, **kwargs: P.kwargs) -> S:
        found = await self.run(functools.partial(call, self.store, *args, **kwargs), undo=undo)
        return wrap(self, found)

    return awaited


def _buffers(store: Runs, found: list[ValueBuffer | None]) -> list[AsyncValueBuffer | None]:
    return [None if one is None else AsyncValueBuffer(store, one) for one in found]


class AsyncStore:
    """A store whose calls are awaited. For one event loop; an asynchronous context manager.

    Each call is the one of the same name of :class:`Store`: same arguments, results and errors. It runs on
    one of a few threads; a call that finds them all busy waits for its turn. Sessions, readers and buffers
    that it hands out are awaited likewise (see ``aio_held``): ``async with await store.read_session(keys)``.

    Cancelling (``task.cancel()``, ``asyncio.timeout()``) a call that still waits for its turn undoes it: it
    never happens. One that runs already is not torn apart: it is waited for, so that the memory it reads or
    writes is the caller's again when the cancellation is seen. It ends by the deadlines of the store's
    settings (``call_timeout_s``, ``put_wait_s``) and those of the engine.

    Handlers of ``on_evicted`` and ``on_cleared`` run on a thread of the store, not in the event loop.

    Attributes:
        store: the store below; it may be used at the same time.
    """

    def __init__(self, store: Store, *, threads: int = DEFAULT_THREADS) -> None:
        """Wrap a store, which this closes with itself. ``threads`` calls run at once; raises ConfigError."""
        if threads < 1:
            raise ConfigError(f"threads is {threads}; an AsyncStore needs at least one")
        self.store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mooncake-store-aio")

    @classmethod
    async def open(
        cls,
        engine: TransferEngine,
        master: str | Master | None = None,
        *,
        lend_bytes: int = 0,
        config: StoreConfig | None = None,
        tiers: Sequence[Tier] = (),
        threads: int = DEFAULT_THREADS,
    ) -> AsyncStore:
        """Join a master, or be one, without holding up the loop: ``async with await AsyncStore.open(…)``.

        Arguments and errors as those of :class:`Store`.
        """
        opening = functools.partial(Store, engine, master, lend_bytes=lend_bytes, config=config, tiers=tiers)
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(None, opening)
        try:
            store = await asyncio.shield(future)
        except asyncio.CancelledError:
            (await _ended(future)).close()
            raise
        return cls(store, threads=threads)

    # Puts.
    put = _twin(Store.put)
    put_from = _twin(Store.put_from)
    put_parts = _twin(Store.put_parts)
    batch_put_from = _twin(Store.batch_put_from)
    batch_put_parts = _twin(Store.batch_put_parts)
    # Gets.
    get = _twin(Store.get)
    get_into = _twin(Store.get_into)
    get_range = _twin(Store.get_range)
    # One that nobody gets must not keep its lease.
    open_value = _handing_out(Store.open_value, AsyncValueReader, undo=ValueReader.give_up)
    get_buffer = _handing_out(Store.get_buffer, AsyncValueBuffer)
    batch_get_buffer = _handing_out(Store.batch_get_buffer, _buffers)
    batch_get_into = _twin(Store.batch_get_into)
    batch_get_parts_into = _twin(Store.batch_get_parts_into)
    # The rest.
    read_session = _handing_out(Store.read_session, AsyncReadSession)
    write_session = _handing_out(Store.write_session, AsyncWriteSession)
    exist = _twin(Store.exist)
    batch_exist = _twin(Store.batch_exist)
    remove = _twin(Store.remove)
    batch_remove = _twin(Store.batch_remove)
    on_evicted = _twin(Store.on_evicted)
    on_cleared = _twin(Store.on_cleared)
    on_segment_change = _twin(Store.on_segment_change)
    pin = _twin(Store.pin)
    batch_pin = _twin(Store.batch_pin)
    unpin = _twin(Store.unpin)
    batch_unpin = _twin(Store.batch_unpin)
    end_session = _twin(Store.end_session)
    size = _twin(Store.size)
    batch_size = _twin(Store.batch_size)
    ls = _twin(Store.ls)
    remove_by_regex = _twin(Store.remove_by_regex)
    remove_all = _twin(Store.remove_all)
    replicas = _twin(Store.replicas)
    batch_replicas = _twin(Store.batch_replicas)
    replicate = _twin(Store.replicate)
    copy = _twin(Store.copy)
    move = _twin(Store.move)
    drain = _twin(Store.drain)
    stop_draining = _twin(Store.stop_draining)
    stats = _twin(Store.stats)
    report = _twin(Store.report)
    numbers = _twin(Store.numbers)

    @property
    def config(self) -> StoreConfig:
        """Settings of the store."""
        return self.store.config

    @property
    def segment(self) -> Region | None:
        """See :attr:`Store.segment`."""
        return self.store.segment

    @property
    def segment_id(self) -> int:
        """See :attr:`Store.segment_id`."""
        return self.store.segment_id

    @property
    def engine(self) -> TransferEngine:
        """See :attr:`Store.engine`."""
        return self.store.engine

    @property
    def tiers(self) -> list[Tier]:
        """See :attr:`Store.tiers`."""
        return self.store.tiers

    @property
    def master(self) -> Master | None:
        """See :attr:`Store.master`."""
        return self.store.master

    async def close(self) -> None:
        """Wait for the calls that run, drop those that wait for their turn, and close the store.

        Safe to call twice. A cancellation is seen when the store is closed.
        """
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(None, self._close)
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await _ended(closing)
            raise

    async def __aenter__(self) -> AsyncStore:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def stop_threads(self) -> None:
        """End the threads and leave the store open: drops calls that wait for their turn. Blocks."""
        self._pool.shutdown(cancel_futures=True)

    def _close(self) -> None:
        self.stop_threads()
        self.store.close()

    async def run(
        self, call: Callable[[], R], *, undo: Callable[[R], None] | None = None, always: bool = False
    ) -> R:
        """Run a blocking call on the store's threads, cancelled as every call here.

        Raises what it raises, and StoreClosed. ``undo`` gets the result of a call cancelled too late.
        ``always``: a cancelled one runs all the same, as what ends a lease or a reservation has to.
        """
        try:
            running: Future[R] = self._pool.submit(call)
        except RuntimeError as error:  # all that submit() has to say
            raise StoreClosed("the asynchronous store has been closed") from error
        result = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            if running.cancelled() and not _being_cancelled():
                raise StoreClosed("the asynchronous store was closed before this call had its turn") from None
            if always or not running.cancel():
                await _settled(result)
                if undo is not None and running.exception() is None:
                    self._pool.submit(undo, running.result())
            raise


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    cancelling = getattr(task, "cancelling", None)  # Python 3.11
    return cancelling is None or cancelling() > 0


async def _settled(result: asyncio.Future[R]) -> None:
    """Wait for the end of a call whose result nobody wants, whatever happens meanwhile."""
    while not result.done():
        try:
            await asyncio.wait([result])
        except asyncio.CancelledError:
            continue  # cancelled once more: the memory is still in use
    if not result.cancelled():
        result.exception()  # seen, so that asyncio does not report it as lost


async def _ended(result: asyncio.Future[R]) -> R:
    await _settled(result)
    return result.result()
