"""Torch tensors in the store, whole or in shards: see :class:`TensorStore`. Needs torch."""

from mooncake_store.tensors.aio import AsyncTensorStore
from mooncake_store.tensors.boxes import Shard
from mooncake_store.tensors.store import TensorStore

__all__ = ["AsyncTensorStore", "Shard", "TensorStore"]
