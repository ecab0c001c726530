"""Compares what was moved: xxh3-64 checksums of both ends, independent of driver and network.

The owner of the remote region reads its own memory and answers with checksums, so a byte that changed
anywhere on the way (in a NIC, on a wire, in a driver) is found. Blocks that differ are moved again.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import random
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from mooncake_transfer import _wire
from mooncake_transfer._errors import (
    CallTimeout,
    ConfigError,
    EngineClosed,
    IntegrityError,
    PeerIncompatible,
    PeerUnreachable,
    RegionRefused,
    RegionUnknown,
    RemoteError,
    TransferError,
)
from mooncake_transfer._scarce import event_descriptor, start_thread
from mooncake_transfer.memory import MemoryKind
from mooncake_transfer.peer import CHECKSUM_METHOD, Caller, Peer

if TYPE_CHECKING:
    from mooncake_transfer.engine import TransferEngine
    from mooncake_transfer.region import Region
    from mooncake_transfer.transfer import LaunchOptions, Transfer

ATTEMPTS = 3
RANGE_BYTES = 1 << 20
"""What one checksum covers: the unit that is moved again."""
BYTES_PER_CALL = 256 << 20
ROWS_PER_FETCH = 1 << 16

THREADS_PER_PEER = 2
JOIN_S = 5.0
LOOK_S = 0.05
"""How soon a move that repeats another one notices that the other was cancelled."""

HINDRANCES = (PeerUnreachable, CallTimeout, RegionRefused)
"""What ``wait()`` raises as itself when it hinders a comparison; anything else is an IntegrityError."""

log = logging.getLogger(__name__)

Checksum = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no number beyond 64 bits
Rows = npt.NDArray[np.uint64]


class _Ended(Exception):
    """The run was cancelled, or its time is up: nobody wants to know any more."""


class _Lane:
    """The runs of one peer that wait to be compared, and how many threads do so."""

    def __init__(self) -> None:
        self.waiting: deque[_Check] = deque()
        self.threads = 0


class Integrity:
    """Verifies the transfers of one engine, on threads of each peer: one that hangs holds up nobody else."""

    def __init__(self, engine: TransferEngine, sample: float | None):
        """``sample``: the share of ranges (RANGE_BYTES at most) to compare; None compares all."""
        self._engine = weakref.ref(engine)
        self._sample = sample
        self._lock = threading.Lock()
        self._tickets = itertools.count(1)
        self._running: dict[int, tuple[Transfer, LaunchOptions]] = {}
        self._lanes: dict[Peer, _Lane] = {}
        self._threads: set[threading.Thread] = set()
        self._stopping = False

    def launch(self, transfer: Transfer, options: LaunchOptions) -> None:
        """Start a run that is done when it was compared.

        Raises ConfigError when the peer would not tell its checksums or this end has none, and what
        ``Transfer.launch`` does.
        """
        ticket = self._expect(transfer, options)
        try:
            transfer.launch(held=ticket, **options)
        except Exception:  # not Ctrl-C: then it may be running, and is to be compared all the same
            with self._lock:
                self._running.pop(ticket, None)
            raise

    def _expect(self, transfer: Transfer, options: LaunchOptions) -> int:
        """Keep a transfer until the core says that its bytes have moved; returns the ticket of this run."""
        if transfer.write and "r" not in transfer.remote.access:
            raise ConfigError(
                f"{_what(transfer)} cannot be verified: its descriptor allows access "
                f"{transfer.remote.access!r}, and checksums are told to who may read; "
                "ask for a descriptor with 'rw', or post with verify=False"
            )
        for end, region in (("local", transfer.local), ("remote", transfer.remote)):
            # A remote one that does not tell its kind may be main memory; if not, its owner says so later.
            if region.kind is not None and region.kind is not MemoryKind.DRAM:
                raise ConfigError(
                    f"{_what(transfer)} cannot be verified: {end} region {region.name!r} is of kind "
                    f"{region.kind.name}, and only main memory has checksums; post with verify=False"
                )
        ticket = next(self._tickets)
        with self._lock:
            self._running[ticket] = transfer, options
        return ticket

    def moved(self, ticket: int) -> None:
        """No byte of it moves any more: compare when it went well, then let it be done."""
        with self._lock:
            transfer, options = self._running.pop(ticket)
            if self._stopping or not transfer.wants_check(ticket):
                return
            lane = self._lanes.setdefault(transfer.remote.peer, _Lane())
            lane.waiting.append(_Check(self._engine, transfer, ticket, self._sample, options))
            if lane.threads == THREADS_PER_PEER:
                return
            lane.threads += 1
            peer = transfer.remote.peer
            name = f"mooncake-integrity {peer.address}"
            thread = threading.Thread(target=self._run, args=(peer, lane), name=name, daemon=True)
            try:
                start_thread(thread)  # it asks for the lock first
            except TransferError as error:
                self._lose_thread(peer, lane, error)
            else:
                self._threads.add(thread)

    def _lose_thread(self, peer: Peer, lane: _Lane, error: TransferError) -> None:
        lane.threads -= 1
        if lane.threads > 0:  # the others compare it
            return
        del self._lanes[peer]
        for check in lane.waiting:
            check.give_up(error)

    def stop(self) -> None:
        """End the threads; core and channel are closed already."""
        with self._lock:
            self._stopping = True
            threads = list(self._threads)
        for thread in threads:
            thread.join(JOIN_S)

    def _run(self, peer: Peer, lane: _Lane) -> None:
        while True:
            with self._lock:
                if self._stopping or not lane.waiting:
                    lane.threads -= 1
                    if lane.threads == 0:
                        del self._lanes[peer]
                    self._threads.discard(threading.current_thread())
                    return
                check = lane.waiting.popleft()
            try:
                check.run()
            except Exception:  # its transfer has ended as failed; the others of this peer have their turn
                where = {"peer": peer.address}
                log.exception("comparing what was moved to or from %s failed", peer.address, extra=where)


class _Check:
    """The comparison of one run, which may be cancelled at any moment."""

    def __init__(
        self,
        engine: weakref.ref[TransferEngine],
        transfer: Transfer,
        ticket: int,
        sample: float | None,
        options: LaunchOptions,
    ):
        self._engine = engine
        self._options = options
        self._transfer = transfer
        self._ticket = ticket
        self._sample = sample

    def run(self) -> None:
        """Compare, move again what differs, and end the transfer with what came of it."""
        try:
            failure = self._verify()
        except TransferError as error:
            self.give_up(error)
        except BaseException as error:  # whoever waits learns that it was not compared
            self.give_up(TransferError("an error of this engine"))
            if not isinstance(error, _Ended):  # then it has its result, which release() leaves as it is
                raise
        else:
            self._transfer.release(self._ticket, failure.encode(), IntegrityError.__name__)

    def give_up(self, error: TransferError) -> None:
        """End the transfer, which was not compared because of ``error``."""
        kind = next((known for known in HINDRANCES if isinstance(error, known)), IntegrityError)
        failure = f"{_what(self._transfer)}: the bytes have moved and could not be compared: {error}"
        self._transfer.release(self._ticket, failure.encode(), kind.__name__)

    def _verify(self) -> str:
        failure = ""
        for rows in _fetch(self._transfer, self._sample):
            failure = failure or self._verify_rows(rows)
        return failure

    def _verify_rows(self, rows: Rows) -> str:
        for _ in range(ATTEMPTS):
            rows = self._different(rows)
            if not len(rows):
                return ""
            self._move_again(rows)
        rows = self._different(rows)
        if not len(rows):
            return ""
        local, remote, nbytes = (int(value) for value in rows[0])
        return (
            f"{_what(self._transfer)}: {len(rows)} ranges still differ after they were moved "
            f"{ATTEMPTS + 1} times, the first at local offset {local}, remote offset {remote}, "
            f"{nbytes} bytes (moved over {', '.join(self._transfer.bytes_by_rail)}); "
            "test the memory and the network of both"
        )

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """While the local memory is used: a cancelled run ends only afterwards."""
        if not self._transfer.begin_check(self._ticket):
            raise _Ended
        try:
            yield
        finally:
            self._transfer.end_check(self._ticket)

    def _move_again(self, rows: Rows) -> None:
        engine, transfer = self._engine(), self._transfer
        if engine is None:
            raise EngineClosed("the engine is closing")
        again = engine.prepare_write if transfer.write else engine.prepare_read
        until_s = time.monotonic() + engine.config.transfer_timeout_s
        with self._memory(), event_descriptor() as signal:
            part = again(transfer.local, transfer.remote, rows)
            part.launch(priority="high", drivers=self._options["drivers"], attempts=self._options["attempts"])
            part.signal_when_done(signal)
            while not part.done():
                if not transfer.wants_check(self._ticket) or time.monotonic() >= until_s:
                    part.cancel()
                select.select([signal], [], [], LOOK_S)
            part.wait()

    def _different(self, rows: Rows) -> Rows:
        """The rows whose bytes differ at the two ends."""
        with self._memory():
            view = self._transfer.local.view()
            ours = [xxhash.xxh3_64_intdigest(view[int(o) : int(o + n)]) for o, _, n in rows]
        wrong: Rows = rows[np.array(ours, dtype=np.uint64) != self._remote_checksums(rows)]
        return wrong

    def _remote_checksums(self, rows: Rows) -> npt.NDArray[np.uint64]:
        remote, engine = self._transfer.remote, self._engine()
        if engine is None:
            raise EngineClosed("the engine is closing")
        limit_s = engine.config.call_timeout_s
        del engine  # it may be given up while the peer is waited for
        query = _wire.ChecksumQuery(remote._id, remote._key, [(int(o), int(n)) for _, o, n in rows])
        try:
            answer = remote.peer._call_for(
                self._transfer, self._ticket, CHECKSUM_METHOD, msgspec.msgpack.encode(query), limit_s
            )
            sums = msgspec.msgpack.decode(answer, type=list[Checksum])
        except msgspec.MsgspecError as error:
            raise PeerIncompatible(f"{remote.peer.address} answers with no checksums: {error}") from None
        except TransferError as error:
            if not self._transfer.wants_check(self._ticket):
                raise _Ended from None
            if isinstance(error, RemoteError) and error.kind == RegionRefused.__name__:
                raise RegionRefused(f"{remote.peer.address} refused its checksums: {error.message}") from None
            raise
        if len(sums) != len(rows):
            raise PeerIncompatible(f"{remote.peer.address} has {len(sums)} checksums for {len(rows)} ranges")
        return np.array(sums, dtype=np.uint64)


def _what(transfer: Transfer) -> str:
    verb = "write to" if transfer.write else "read from"
    return f"{verb} region {transfer.remote.name!r} of {transfer.remote.peer.address}"


def _fetch(transfer: Transfer, sample: float | None) -> Iterator[Rows]:
    """What is compared of a transfer, as rows of at most RANGE_BYTES, a portion at a time."""
    for begin in range(0, transfer.blocks, ROWS_PER_FETCH):
        rows = np.empty((ROWS_PER_FETCH, 3), dtype=np.uint64)
        rows = _cut(rows[: transfer.blocks_into(begin, rows)])
        if sample is not None:
            rows = _sampled(rows, sample)
        for first in range(0, len(rows), BYTES_PER_CALL // RANGE_BYTES):
            yield rows[first : first + BYTES_PER_CALL // RANGE_BYTES]


def _sampled(rows: Rows, share: float) -> Rows:
    """That share of the rows; the fraction of a row that is left over is the chance of one more.

    So the share holds over many transfers of one row too, each of which is compared or not.
    """
    count = int(len(rows) * share + random.random())
    return rows[sorted(random.sample(range(len(rows)), count))]


def _cut(rows: Rows) -> Rows:
    rows = rows[rows[:, 2] > 0]
    pieces = (rows[:, 2] + np.uint64(RANGE_BYTES - 1)) // np.uint64(RANGE_BYTES)
    if pieces.max(initial=0) <= 1:
        return rows
    repeated = np.repeat(rows, pieces.astype(np.int64), axis=0)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
    offset = (np.arange(len(repeated), dtype=np.uint64) - first) * np.uint64(RANGE_BYTES)
    repeated[:, 0] += offset
    repeated[:, 1] += offset
    repeated[:, 2] = np.minimum(repeated[:, 2] - offset, np.uint64(RANGE_BYTES))
    return repeated


class Checksums:
    """Handler of CHECKSUM_METHOD: the checksums of ranges, for who holds a key that may read the region.

    To others a checksum of a short range would tell what it holds.
    """

    def __init__(self, engine: weakref.ref[TransferEngine]):
        self._engine = engine

    def __call__(self, body: bytes, caller: Caller) -> bytes:
        """Answer one query."""
        query = msgspec.msgpack.decode(body, type=_wire.ChecksumQuery)
        region = readable_region(self._engine(), query.region_id, query.key)
        if region.kind is not MemoryKind.DRAM:
            raise RegionUnknown(
                f"region {region.name!r} is of kind {region.kind.name}, which has no checksum"
            )
        sums = [_checksum(region, query.key, offset, nbytes) for offset, nbytes in query.ranges]
        return msgspec.msgpack.encode(sums)


def _checksum(region: Region, key: bytes, offset: int, nbytes: int) -> int:
    if offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
        raise RegionRefused(f"range ({offset}, {nbytes}) is outside region {region.name!r}")
    core = region._core
    if core is None or not core.enter():
        raise RegionRefused(f"region {region.name!r} is being closed")
    try:
        checksum: int = xxhash.xxh3_64_intdigest(region.view()[offset : offset + nbytes])
    finally:
        core.leave()
    if not may_read(region, key):  # afterwards: a key that is revoked meanwhile is told nothing
        raise RegionRefused(f"the key of region {region.name!r} was revoked")
    return checksum


def readable_region(engine: TransferEngine | None, region_id: int, key: bytes) -> Region:
    """The region of this id, for who shows a key that may read it. Raises RegionRefused, EngineClosed."""
    if engine is None:
        raise EngineClosed("the engine is closing")
    region = engine._regions.get(region_id)
    if region is None or not may_read(region, key):
        raise RegionRefused(f"no region {region_id} may be read with this key")
    return region


def may_read(region: Region, key: bytes) -> bool:
    """Whether who has this key may read the region."""
    readers = [granted for granted, access in list(region._granted.items()) if "r" in access]
    return any([hmac.compare_digest(key, mine) for mine in (region.key, *readers)])
