"""Distributed KV-cache object store on top of mooncake-transfer."""
