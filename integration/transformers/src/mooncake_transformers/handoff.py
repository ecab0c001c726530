"""Handing a prompt's KV cache from a prefill worker to a decode worker.

The prefill worker holds the blocks under a transfer id and answers two methods on its engine's channel:

- ``kv.open``: what is held: the memory region, block numbers, first token. May be asked again.
- ``kv.close``: forget it. The answer tells whether it was still held. The decode worker reads with one-sided
  transfers, so only this answer proves that no block was given to another prompt while it read.

Blocks that nobody fetches are freed at a deadline, or when the worker that opened them dies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from mooncake_transfer import Caller, Region, RemoteRegion, TransferEngine
from mooncake_transfer.errors import RemoteError, TransferError
from mooncake_transformers._errors import HandoffMismatch, HandoffUnknown, KVTransferFailed, MalformedRequest
from mooncake_transformers.kv_pool import KVPool

__all__ = ["HandoffClient", "HandoffTable", "Offer", "Pulled", "prompt_digest"]

logger = logging.getLogger(__name__)
OPEN_METHOD = "kv.open"
CLOSE_METHOD = "kv.close"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What ``kv.open`` answers.

    Attributes:
        engine_id: the prefill worker.
        region: descriptor of its KV pool's memory.
        root: root digest of its blocks: equal on both sides when model and layout are.
        blocks: block numbers in the pool, in the prompt's order; the last one may be filled in part.
        prompt: digest of the prompt's tokens.
        prompt_tokens: how many they are.
        cached_tokens: how many of them came from the store.
        first_token: the answer's first token.
        prefill_seconds: what the model took.
    """

    engine_id: str
    region: bytes
    root: bytes
    blocks: list[int]
    prompt: bytes
    prompt_tokens: int
    cached_tokens: int
    first_token: int
    prefill_seconds: float


@dataclass
class _Held:
    offer: Offer
    opened_by: set[int] = field(default_factory=set)


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """16 bytes that name the tokens of a prompt."""
    return xxhash.xxh3_128_digest(np.asarray(token_ids, dtype="<u4").tobytes())


class HandoffTable:
    """The prefill worker's side: what is held for whom. Thread-safe.

    ``call_later(seconds, callback)`` is how deadlines are set (an event loop's own method).
    """

    def __init__(
        self,
        engine: TransferEngine,
        pool: KVPool,
        *,
        deadline_s: float,
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._pool = pool
        self._deadline_s = deadline_s
        self._call_later = call_later
        self._held: dict[str, _Held] = {}
        self._lock = threading.Lock()
        self.expired_count = 0
        engine.serve(OPEN_METHOD, self._on_open)
        engine.serve(CLOSE_METHOD, self._on_close)
        engine.on_peer_lost(self._on_peer_lost)

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, transfer_id: str, offer: Offer) -> None:
        """Keep ``offer.blocks``, whose one user now is this table, for whoever opens ``transfer_id``.

        Raises MalformedRequest when the id is taken; the blocks then stay the caller's.
        """
        with self._lock:
            if transfer_id in self._held:
                raise MalformedRequest(
                    f"transfer_id {transfer_id!r} is held for another request; use a new one for each",
                    param="kv_transfer_params.transfer_id",
                )
            self._held[transfer_id] = _Held(offer)
        self._call_later(self._deadline_s, lambda: self._expire(transfer_id, offer))

    def release(self, transfer_id: str) -> bool:
        """Forget what is held under ``transfer_id``, which nobody will fetch, and free its blocks at once.
        Returns whether it was held.

        A decode worker that reads it right now learns from ``kv.close`` that its bytes cannot be trusted.
        """
        return self._forget(transfer_id)

    def drop_all(self) -> None:
        """Forget everything held."""
        with self._lock:
            held, self._held = self._held, {}
        for entry in held.values():
            self._pool.release(entry.offer.blocks)

    def _on_open(self, payload: bytes, caller: Caller) -> bytes:
        transfer_id = payload.decode()
        with self._lock:
            entry = self._held.get(transfer_id)
            if entry is None:
                raise HandoffUnknown(
                    f"nothing is held under transfer_id {transfer_id!r}: never held, fetched already, "
                    f"or expired after {self._deadline_s:g} s"
                )
            entry.opened_by.add(caller.connection)
            return msgspec.msgpack.encode(entry.offer)

    def _on_close(self, payload: bytes, caller: Caller) -> bytes:
        return msgspec.msgpack.encode(self._forget(payload.decode()))

    def _on_peer_lost(self, caller: Caller) -> None:
        with self._lock:
            orphans = [key for key, entry in self._held.items() if caller.connection in entry.opened_by]
        for transfer_id in orphans:
            logger.info(
                "the decode worker at %s went away; %s is no longer held", caller.address, transfer_id
            )
            self._forget(transfer_id)

    def _expire(self, transfer_id: str, offer: Offer) -> None:
        with self._lock:
            entry = self._held.get(transfer_id)
            if entry is None or entry.offer is not offer:
                return
        if self._forget(transfer_id):
            self.expired_count += 1
            logger.warning(
                "nobody fetched %s within %g s; its blocks are freed", transfer_id, self._deadline_s
            )

    def _forget(self, transfer_id: str) -> bool:
        with self._lock:
            entry = self._held.pop(transfer_id, None)
        if entry is None:
            return False
        self._pool.release(entry.offer.blocks)
        return True


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a fetch moved: bytes, the seconds it took, and the driver that moved most of them."""

    nbytes: int
    seconds: float
    driver: str


class HandoffClient:
    """The decode worker's side. Blocking, thread-safe. Every failure is a KVTransferFailed."""

    def __init__(self, engine: TransferEngine, region: Region, pool: KVPool, root: bytes) -> None:
        self._engine = engine
        self._region = region
        self._pool = pool
        self._root = root
        self._remotes: dict[bytes, RemoteRegion] = {}
        self._lock = threading.Lock()

    def open(self, address: str, transfer_id: str, token_ids: Sequence[int]) -> Offer:
        """Ask the prefill worker's engine at ``address`` what it holds, and check that it is what we need."""
        offer = msgspec.msgpack.decode(self._call(address, OPEN_METHOD, transfer_id), type=Offer)
        if offer.root != self._root:
            raise HandoffMismatch(
                f"the prefill worker at {address} has another model, dtype or block size than this decode "
                "worker; start both with the same --model, --dtype and --block-tokens"
            )
        if offer.prompt != prompt_digest(token_ids):
            raise HandoffMismatch(
                f"transfer {transfer_id!r} was prefilled with another prompt "
                f"({offer.prompt_tokens} tokens there, {len(token_ids)} here); "
                "send the same body to both workers"
            )
        return offer

    def fetch(self, address: str, transfer_id: str, offer: Offer, blocks: Sequence[int]) -> Pulled:
        """Read the offered blocks into our ``blocks``, and close the hand-off."""
        assert len(blocks) == len(offer.blocks), "as many blocks here as there"
        started_s = time.monotonic()
        size = self._pool.layout.block_bytes
        rows = np.empty((len(blocks), 3), dtype=np.uint64)
        rows[:, 0] = np.asarray(blocks, dtype=np.uint64) * np.uint64(size)
        rows[:, 1] = np.asarray(offer.blocks, dtype=np.uint64) * np.uint64(size)
        rows[:, 2] = size
        try:
            transfer = self._engine.read(self._region, self._remote(offer.region), rows)
            transfer.wait()
        except TransferError as error:
            with self._lock:
                self._remotes.pop(offer.region, None)
            raise KVTransferFailed(
                f"the KV cache of transfer {transfer_id!r} could not be read from {address}: {error}; "
                "send the request again"
            ) from error
        seconds = time.monotonic() - started_s
        if not self.close(address, transfer_id):
            raise HandoffUnknown(
                f"transfer {transfer_id!r} expired at {address} while it was read, so its bytes cannot be "
                "trusted; send the request again"
            )
        by_driver = transfer.bytes_by_driver
        return Pulled(transfer.nbytes, seconds, max(by_driver, key=lambda name: by_driver[name], default=""))

    def close(self, address: str, transfer_id: str) -> bool:
        """Let the prefill worker forget the transfer; whether it still held it."""
        return msgspec.msgpack.decode(self._call(address, CLOSE_METHOD, transfer_id), type=bool)

    def _call(self, address: str, method: str, transfer_id: str) -> bytes:
        try:
            return self._engine.connect(address).call(method, transfer_id.encode())
        except RemoteError as error:
            kind = HandoffUnknown if error.kind == HandoffUnknown.__name__ else KVTransferFailed
            raise kind(f"the prefill worker at {address} refused {method}: {error.message}") from error
        except TransferError as error:
            raise KVTransferFailed(f"the prefill worker at {address} cannot be reached: {error}") from error

    def _remote(self, descriptor: bytes) -> RemoteRegion:
        with self._lock:
            known = self._remotes.get(descriptor)
        if known is not None:
            return known
        remote = self._engine.import_region(descriptor)
        with self._lock:
            # Regions of workers that are gone would pile up otherwise.
            gone = [key for key, other in self._remotes.items() if not other.peer.alive]
            for key in gone:
                self._remotes.pop(key).close()
            self._remotes[descriptor] = remote
        return remote
