"""How many keys a second the master's state handles in one thread, and what an object takes of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from mooncake_store import StoreConfig, protocol
from mooncake_store.master.state import MasterState

__all__ = ["BATCH", "Metadata", "measure_metadata"]

BATCH = 128
GRANULE_BYTES = 4096
ROUNDS = 4_000  # batches looked for, of those stored
EPOCH, CLIENT, SEGMENT = 5, 1, 7
SEED = 20261


class Metadata(msgspec.Struct, kw_only=True):
    """What was found: keys a second of processor time of one thread, and bytes an object."""

    objects: int
    reserve_commit: float
    locate_release: float
    exist: float
    bytes_per_object: float


def measure_metadata(objects: int) -> Metadata:
    """Measure in a process of its own, so that nothing else is in its memory."""
    command = [sys.executable, __file__, str(objects)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600, env=dict(os.environ))
    return msgspec.json.decode(done.stdout, type=Metadata)


@dataclass
class _Run:
    """One master with one member, asked as the channel's handler asks it: decode, handle, encode.

    ``spent_s``: processor time of that, of this thread; what the member does is not part of it.
    """

    state: MasterState
    digests: bytes
    spent_s: float = 0.0
    seen: int = 0  # number of the last record taken; masters do not count from 0

    def ask(self, request: protocol.FromMember) -> protocol.Reply:
        request.epoch, request.client = EPOCH, CLIENT
        payload = protocol.encode(request)
        began_s = time.thread_time()
        reply = self.state.handle(protocol.decode_request(payload), CLIENT, "", 0.0)
        protocol.encode(reply)
        self.spent_s += time.thread_time() - began_s
        return reply

    def batch(self, number: int) -> bytes:
        return self.digests[16 * BATCH * number : 16 * BATCH * (number + 1)]

    def fill(self, batches: int) -> None:
        keys = [b"block-%026d" % number for number in range(BATCH)]
        sizes = np.full(BATCH, GRANULE_BYTES, dtype="<u8").tobytes()
        for number in range(batches):
            reserved = self.ask(
                protocol.Reserve(
                    digests=self.batch(number), keys=keys, sizes=sizes, if_exists="keep", avoid=[]
                )
            )
            assert isinstance(reserved, protocol.Reserved)
            commit = protocol.Commit(
                reservation=reserved.reservation,
                failed=[],
                if_exists="keep",
                notices_seen=self.seen,
            )
            committed = self.ask(commit)
            assert isinstance(committed, protocol.Committed)
            ((first, _),) = committed.notices  # more: the master did not take what was confirmed
            self.seen = first + BATCH - 1

    def read(self, batch: bytes) -> None:
        located = self.ask(protocol.Locate(digests=batch))
        assert isinstance(located, protocol.Located)
        self.ask(protocol.Release(lease=located.lease))

    def rate(self, batches: Iterator[int], step: Callable[[bytes], None]) -> float:
        self.spent_s, count = 0.0, 0
        for number in batches:
            step(self.batch(number))
            count += 1
        return count * BATCH / self.spent_s


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _measure(objects: int) -> Metadata:
    batches = objects // BATCH
    random = np.random.default_rng(SEED)
    digests = random.integers(0, 2**63, size=(batches * BATCH, 2), dtype=np.uint64).tobytes()
    before = _resident_bytes()
    run = _Run(MasterState(EPOCH, StoreConfig()), digests)
    room = (batches + 1) * BATCH * GRANULE_BYTES
    mount = protocol.Mount(client=CLIENT, nbytes=room, descriptor=bytes(200), segment=SEGMENT)
    run.state.handle(mount, CLIENT, "", 0.0)
    run.fill(batches)
    filled_s = run.spent_s
    run.ask(protocol.Heartbeat(leases=[], notices_seen=run.seen))
    resident = _resident_bytes() - before
    picked = random.integers(0, batches, size=(2, ROUNDS)).tolist()
    return Metadata(
        objects=batches * BATCH,
        reserve_commit=batches * BATCH / filled_s,
        locate_release=run.rate(iter(picked[0]), run.read),
        exist=run.rate(iter(picked[1]), lambda batch: run.ask(protocol.Exist(digests=batch)) and None),
        bytes_per_object=resident / (batches * BATCH),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure(int(sys.argv[1]))))
