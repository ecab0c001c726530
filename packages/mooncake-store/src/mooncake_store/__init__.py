"""Distributed KV-cache object store on top of mooncake-transfer."""

from mooncake_store import errors, keys
from mooncake_store.aio import AsyncStore
from mooncake_store.buffers import ValueBuffer
from mooncake_store.client import Store
from mooncake_store.config import StoreConfig
from mooncake_store.master import Master
from mooncake_store.policy import PutPolicy, TenantPolicy
from mooncake_store.protocol import CopyOutcome, Drained, StoreStats

__all__ = [
    "AsyncStore",
    "CopyOutcome",
    "Drained",
    "Master",
    "PutPolicy",
    "Store",
    "StoreConfig",
    "StoreStats",
    "TenantPolicy",
    "ValueBuffer",
    "errors",
    "keys",
]
