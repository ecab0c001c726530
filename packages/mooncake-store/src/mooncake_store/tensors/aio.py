"""Tensors for asyncio: every call of :class:`TensorStore`, awaited."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Concatenate, ParamSpec, TypeVar

from mooncake_store.aio import AsyncStore
from mooncake_store.tensors.store import TensorStore

__all__ = ["AsyncTensorStore"]

P = ParamSpec("P")
R = TypeVar("R")


def _twin(
    call: Callable[Concatenate[TensorStore, P], R],
) -> Callable[Concatenate[AsyncTensorStore, P], Coroutine[object, object, R]]:
    """Return the same call as a coroutine, with its parameters and its promises."""

    @functools.wraps(call)
    async def awaited(self: AsyncTensorStore, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self.store.run(functools.partial(call, self.tensors, *args, **kwargs))

    return awaited


class AsyncTensorStore:
    """Torch tensors in an asynchronous store: the calls of :class:`TensorStore`, on the store's threads, with
    the cancellation of :class:`AsyncStore`. Closes nothing.

    Attributes:
        store: the store.
        tensors: the same tensors without asyncio; it may be used at the same time.
    """

    def __init__(self, store: AsyncStore) -> None:
        self.store = store
        self.tensors = TensorStore(store.store)

    put = _twin(TensorStore.put)
    put_shard = _twin(TensorStore.put_shard)
    batch_put = _twin(TensorStore.batch_put)
    get = _twin(TensorStore.get)
    get_into = _twin(TensorStore.get_into)
    batch_get = _twin(TensorStore.batch_get)
    describe = _twin(TensorStore.describe)
    remove = _twin(TensorStore.remove)
    put_safetensors = _twin(TensorStore.put_safetensors)
    save_safetensors = _twin(TensorStore.save_safetensors)
