"""Distributed KV-cache object store on top of mooncake-transfer."""

from mooncake_store import errors, keys
from mooncake_store.client import Store
from mooncake_store.config import StoreConfig
from mooncake_store.master import Master
from mooncake_store.protocol import StoreStats

__all__ = ["Master", "Store", "StoreConfig", "StoreStats", "errors", "keys"]
