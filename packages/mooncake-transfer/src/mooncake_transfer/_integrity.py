"""Compares what was moved: xxh3-64 checksums of both ends, independent of driver and network.

The owner of the remote region reads its own memory and answers with checksums, so a byte that changed
anywhere on the way (in a NIC, on a wire, in a driver) is found. Blocks that differ are moved again.
"""

from __future__ import annotations

import hmac
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_transfer import _wire
from mooncake_transfer._errors import EngineClosed, RegionRefused, RegionUnknown, TransferError
from mooncake_transfer.memory import MemoryKind
from mooncake_transfer.peer import CHECKSUM_METHOD, Caller

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.region import Region
    from mooncake_transfer.transfer import Transfer

ATTEMPTS = 3
RANGE_BYTES = 1 << 20
"""What one checksum covers: the unit that is moved again."""
RANGES_PER_CALL = 4096
BYTES_PER_CALL = 256 << 20
ROWS_PER_FETCH = 1 << 16

Rows = npt.NDArray[np.uint64]


class Integrity:
    """Verifies the transfers of one engine, on threads of its own."""

    def __init__(self, engine: TransferEngine, sample: float | None):
        """``sample``: the share of blocks to compare; None compares all."""
        self._engine = weakref.ref(engine)
        self._sample = sample
        self._lock = threading.Lock()
        self._running: dict[int, Transfer] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="mooncake-integrity")

    def expect(self, transfer: Transfer) -> None:
        """Keep a transfer until the core says that its bytes have moved."""
        with self._lock:
            self._running[transfer.token] = transfer

    def forget(self, transfer: Transfer) -> None:
        """Do not expect it any more: it could not be posted."""
        with self._lock:
            self._running.pop(transfer.token, None)

    def moved(self, token: int) -> None:
        """Its bytes have moved: compare, then let it be done."""
        with self._lock:
            transfer = self._running.pop(token)
        self._pool.submit(self._verify, transfer)

    def stop(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _verify(self, transfer: Transfer) -> None:
        failure = ""
        try:
            for rows in _fetch(transfer, self._sample):
                failure = failure or self._verify_rows(transfer, rows)
        except TransferError as error:
            failure = f"{_what(transfer)}: the bytes have moved and could not be compared: {error}"
        transfer.release(failure.encode())

    def _verify_rows(self, transfer: Transfer, rows: Rows) -> str:
        for _ in range(ATTEMPTS):
            rows = self._different(transfer, rows)
            if not len(rows):
                return ""
            self._move_again(transfer, rows)
        rows = self._different(transfer, rows)
        if not len(rows):
            return ""
        local, remote, nbytes = (int(value) for value in rows[0])
        return (
            f"{_what(transfer)}: {len(rows)} ranges still differ after they were moved {ATTEMPTS + 1} times, "
            f"the first at local offset {local}, remote offset {remote}, {nbytes} bytes "
            f"(moved over {', '.join(transfer.bytes_by_rail)}); test the memory and the network of both"
        )

    def _move_again(self, transfer: Transfer, rows: Rows) -> None:
        engine = self._engine()
        if engine is None:
            raise EngineClosed("the engine is closing")
        again = engine.prepare_write if _writes(transfer) else engine.prepare_read
        again(transfer.local, transfer.remote, rows).post(priority="high", verify=False).wait()

    def _different(self, transfer: Transfer, rows: Rows) -> Rows:
        """The rows whose bytes differ at the two ends."""
        view = transfer.local.view()
        wrong = []
        for begin in range(0, len(rows), RANGES_PER_CALL):
            part = rows[begin : begin + RANGES_PER_CALL]
            ours = [xxhash.xxh3_64_intdigest(view[int(o) : int(o + n)]) for o, _, n in part]
            wrong.append(part[np.array(ours, dtype=np.uint64) != _remote_checksums(transfer, part)])
        return np.concatenate(wrong) if wrong else rows


def _writes(transfer: Transfer) -> bool:
    return transfer.write


def _what(transfer: Transfer) -> str:
    verb = "write to" if _writes(transfer) else "read from"
    return f"{verb} region {transfer.remote.name!r} of {transfer.remote.peer.address}"


def _fetch(transfer: Transfer, sample: float | None) -> Iterator[Rows]:
    """The blocks of a transfer as rows of at most RANGE_BYTES, a portion at a time."""
    for begin in range(0, transfer.blocks, ROWS_PER_FETCH):
        rows = np.empty((ROWS_PER_FETCH, 3), dtype=np.uint64)
        rows = rows[: transfer.blocks_into(begin, rows)]
        if sample is not None:
            chosen = random.sample(range(len(rows)), max(1, round(len(rows) * sample)))
            rows = rows[sorted(chosen)]
        yield from _cut(rows)


def _cut(rows: Rows) -> Iterator[Rows]:
    rows = rows[rows[:, 2] > 0]
    if not len(rows):
        return
    pieces = (rows[:, 2] + np.uint64(RANGE_BYTES - 1)) // np.uint64(RANGE_BYTES)
    if pieces.max() > 1:
        repeated = np.repeat(rows, pieces.astype(np.int64), axis=0)
        first = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
        offset = (np.arange(len(repeated), dtype=np.uint64) - first) * np.uint64(RANGE_BYTES)
        repeated[:, 0] += offset
        repeated[:, 1] += offset
        repeated[:, 2] = np.minimum(repeated[:, 2] - offset, np.uint64(RANGE_BYTES))
        rows = repeated
    for begin in range(0, len(rows), BYTES_PER_CALL // RANGE_BYTES):
        yield rows[begin : begin + BYTES_PER_CALL // RANGE_BYTES]


def _remote_checksums(transfer: Transfer, rows: Rows) -> npt.NDArray[np.uint64]:
    remote = transfer.remote
    query = _wire.ChecksumQuery(remote._id, remote._key, [(int(o), int(n)) for _, o, n in rows])
    answer = remote.peer.call(CHECKSUM_METHOD, msgspec.msgpack.encode(query))
    return np.array(msgspec.msgpack.decode(answer, type=list[int]), dtype=np.uint64)


class Checksums:
    """Handler of CHECKSUM_METHOD: the checksums of ranges, for who holds a key of the region."""

    def __init__(self, engine: weakref.ref[TransferEngine]):
        self._engine = engine

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        """Answer one query."""
        query = msgspec.msgpack.decode(body, type=_wire.ChecksumQuery)
        engine = self._engine()
        if engine is None:
            raise EngineClosed("the engine is closing")
        region = engine._regions.get(query.region_id)
        if region is None or not _holds(region, query.key):
            raise RegionRefused(f"no region {query.region_id} has this key")
        if region.kind is not MemoryKind.DRAM:
            raise RegionUnknown(
                f"region {region.name!r} is of kind {region.kind.name}, which has no checksum"
            )
        view = region.view()
        sums = []
        for offset, nbytes in query.ranges:
            if offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
                raise RegionRefused(f"range ({offset}, {nbytes}) is outside region {region.name!r}")
            sums.append(xxhash.xxh3_64_intdigest(view[offset : offset + nbytes]))
        return msgspec.msgpack.encode(sums)


def _holds(region: Region, key: bytes) -> bool:
    known = [region.key, *region._granted]
    return any([hmac.compare_digest(key, mine) for mine in known])
