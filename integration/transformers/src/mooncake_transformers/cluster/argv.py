"""The command lines of a cluster's processes: pure functions of the spec."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mooncake_transformers.cluster.spec import ClusterSpec

__all__ = ["conductor_argv", "master_argv", "worker_argv"]

# The interpreter that runs now, so that a cluster never mixes two environments.
MOONCAKE = (sys.executable, "-m", "mooncake_transfer.cli")


def master_argv(spec: ClusterSpec, port: int) -> list[str]:
    """Command of the store's master, its channel on ``port``; 0 is any free port."""
    return [*MOONCAKE, "store", "master", "--host", spec.host, "--port", str(port)]


def worker_argv(spec: ClusterSpec, role: str, master: str, port: int) -> list[str]:
    """Command of one worker.

    Args:
        spec: the cluster it belongs to.
        role: ``"prefill"`` or ``"decode"``.
        master: the store master's address, ``"host:port"``.
        port: where its HTTP API listens; 0 is any free port.
    """
    argv = [*MOONCAKE, "worker", "--role", role, "--host", spec.host, "--port", str(port), "--store", master]
    argv += ["--model", spec.model, "--dtype", spec.dtype, "--device", spec.device]
    argv += ["--block-tokens", str(spec.block_tokens), "--threads", str(spec.threads)]
    argv += ["--lend", str(spec.segment_bytes), "--kv-pool", str(spec.pool_bytes)]
    for driver in spec.drivers or ():
        argv += ["--driver", driver]
    return argv


def conductor_argv(spec: ClusterSpec, worker_urls: Sequence[str], port: int) -> list[str]:
    """Command of the conductor in front of ``worker_urls``, its gateway on ``port``."""
    argv = [*MOONCAKE, "conductor", "--host", spec.host, "--port", str(port)]
    for url in worker_urls:
        argv += ["--worker", url]
    return argv
