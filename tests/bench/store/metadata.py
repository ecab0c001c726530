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

from mooncake_store import Store, StoreConfig, protocol
from mooncake_store.batch import Batch
from mooncake_store.master.state import MasterState
from mooncake_store.membership import lease_clock
from mooncake_transfer import Region, TransferEngine

__all__ = ["BATCH", "Metadata", "measure_metadata"]

BATCH = 128
GRANULE_BYTES = 4096
ROUNDS = 4_000  # batches looked for, of those stored
EPOCH, CLIENT, SEGMENT = 5, 1, 7
SEED = 20261
VALUE_BYTES, CHANNEL_BATCHES, CHANNEL_S = 64, 64, 3.0


class Metadata(msgspec.Struct, kw_only=True):
    """What was found: keys a second, and bytes an object.

    Attributes:
        reserve_commit, locate_release, exist: keys a second of processor time of the master's one thread.
        over_channel: keys that are located and released, a second of the clock, by one client in a process of
            its own that waits for each answer.
    """

    objects: int
    reserve_commit: float
    locate_release: float
    exist: float
    over_channel: float
    bytes_per_object: float


def measure_metadata(objects: int) -> Metadata:
    """Measure in a process of its own, so that nothing else is in its memory."""
    command = [sys.executable, __file__, str(objects)]
    done = subprocess.run(command, check=True, capture_output=True, timeout=600, env=dict(os.environ))
    found = msgspec.json.decode(done.stdout, type=Metadata)
    return msgspec.structs.replace(found, over_channel=_measure_over_channel())


def _measure_over_channel() -> float:
    """Keys a second that a client locates and releases at a master of another process."""
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as master:
        assert master.stdout is not None
        address = master.stdout.readline().strip()
        try:
            with TransferEngine() as engine, Store(engine, address) as client:
                return _locate_over(client, engine.allocate(BATCH * VALUE_BYTES))
        finally:
            master.communicate()  # which ends its standard input, and so itself


def _locate_over(client: Store, region: Region) -> float:
    batches = [
        Batch("", [f"block-{number}-{at}" for at in range(BATCH)]) for number in range(CHANNEL_BATCHES)
    ]
    for batch in batches:
        offsets = np.arange(BATCH) * VALUE_BYTES
        assert all(client.batch_put_from(batch.keys, region, offsets, VALUE_BYTES))
    count, began_s = 0, time.monotonic()
    while (took_s := time.monotonic() - began_s) < CHANNEL_S:
        asked_s, request = lease_clock(), protocol.Locate(digests=batches[count % CHANNEL_BATCHES].packed)
        located = client._member.ask(request, protocol.Located)
        assert all(located.found)
        client._member.let_go(located.lease, request.epoch, asked_s, soon=True)  # told with the next one
        count += 1
    return count * BATCH / took_s


def _serve() -> None:
    with TransferEngine() as engine, Store(engine, lend_bytes=64 << 20) as master:
        sys.stdout.write(f"{master.engine.address}\n")
        sys.stdout.flush()
        sys.stdin.read()


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
                sums=self.batch(number)[: 8 * BATCH],
            )
            committed = self.ask(commit)
            assert isinstance(committed, protocol.Committed)
            ((first, _),) = committed.notices  # more: the master did not take what was confirmed
            self.seen = first + BATCH - 1

    def read(self, batch: bytes) -> None:
        located = self.ask(protocol.Locate(digests=batch, summed=True))
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
        over_channel=0.0,  # measured by who has started this
        exist=run.rate(iter(picked[1]), lambda batch: run.ask(protocol.Exist(digests=batch)) and None),
        bytes_per_object=resident / (batches * BATCH),
    )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve()
    else:
        sys.stdout.buffer.write(msgspec.json.encode(_measure(int(sys.argv[1]))))
