"""A master of a cluster, as a process: ``store_cluster_master.py URL LEADER_TTL_S GRANULE_BYTES``.

Prints its address, and ends when its standard input does.
"""

from __future__ import annotations

import sys

from mooncake_store import StoreConfig
from mooncake_store.cluster.master import ClusterMaster
from mooncake_transfer import TransferEngine


def main() -> None:
    url, ttl_s, granule_bytes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    config = StoreConfig(leader_ttl_s=ttl_s, granule_bytes=granule_bytes)
    with TransferEngine() as engine, ClusterMaster(engine, url, config):
        sys.stdout.write(engine.address + "\n")
        sys.stdout.flush()
        sys.stdin.read()


main()
