"""The crowd: one engine that moves blocks to and from many peers at once, from several threads for each."""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import wire

from mooncake_transfer import TransferConfig, TransferEngine

PROCESSES = 4
SIZES = (64, 4 << 10, 64 << 10, 256 << 10, 1 << 20)
ROOM = 2 * max(SIZES)  # of one thread: what it writes, and what it reads back
VERIFIED = 4 << 10  # up to this size every round trip is compared byte by byte
WAIT_S = 30.0
CONFIG = TransferConfig(drivers=("tcp",))


class Member(threading.Thread):
    """One thread at one peer: writes blocks of mixed sizes, reads them back, and counts."""

    def __init__(self, engine: TransferEngine, local, remote, room: int, remote_room: int, end_s: float):
        super().__init__()
        self._engine, self._local, self._remote = engine, local, remote
        self._room, self._remote_room, self._end_s = room, remote_room, end_s
        self._order = random.Random(room)
        self.bytes = self.operations = 0
        self.errors: list[str] = []

    def run(self) -> None:
        """Move blocks until the end, noting what fails."""
        for size in self._mixed_sizes():
            if time.monotonic() > self._end_s:
                return
            try:
                self._round_trip(size)
            except Exception as error:  # counted and shown: the run is about there being none
                self.errors.append(f"{type(error).__name__}: {error}")

    def _mixed_sizes(self) -> Iterator[int]:
        # Every size once before any comes again: what a member has moved then tells how it was served.
        while True:
            yield from self._order.sample(SIZES, len(SIZES))

    def _round_trip(self, size: int) -> None:
        view, here, there = self._local.view(), self._room, self._remote_room
        back = here + ROOM // 2
        if size <= VERIFIED:
            view[here : here + size] = self._order.randbytes(size)
        self._engine.write(self._local, self._remote, [[here, there, size]]).wait(WAIT_S)
        self._engine.read(self._local, self._remote, [[back, there, size]]).wait(WAIT_S)
        if size <= VERIFIED and view[here : here + size] != view[back : back + size]:
            raise ValueError(f"{size} bytes came back changed")
        self.bytes += 2 * size
        self.operations += 2


def serve(engines: int, room: int) -> None:
    """Be some of the peers until standard input ends."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    made = [TransferEngine(CONFIG) for _ in range(engines)]
    regions = [engine.allocate(room) for engine in made]
    wire.say(answers, {"descriptors": [region.descriptor().hex() for region in regions], "pid": os.getpid()})
    sys.stdin.buffer.read()
    for engine in made:
        engine.close()


def resident_bytes(pids: list[int]) -> int:
    """Memory of these processes that is in RAM."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(peers: int, threads: int, seconds: float) -> dict[str, object]:
    """Start the peers, let all threads loose, and say how it went."""
    share = str(peers // PROCESSES)
    argv = [sys.executable, __file__, "--serve", share, "--threads", str(threads)]
    started = [wire.start_target(argv) for _ in range(PROCESSES)]
    descriptors = [bytes.fromhex(text) for _, told in started for text in told["descriptors"]]
    pids = [os.getpid()] + [told["pid"] for _, told in started]
    with TransferEngine(CONFIG) as engine:
        local = engine.allocate(ROOM * threads * peers, prefault=True)
        remotes = [engine.import_region(descriptor) for descriptor in descriptors]
        end_s = time.monotonic() + seconds
        members = [
            [
                Member(engine, local, remote, (peer * threads + index) * ROOM, index * ROOM, end_s)
                for index in range(threads)
            ]
            for peer, remote in enumerate(remotes)
        ]
        everyone = [member for group in members for member in group]
        for member in everyone:
            member.start()
        samples = []
        while time.monotonic() < end_s:
            samples.append((sum(member.operations for member in everyone), resident_bytes(pids)))
            time.sleep(seconds / 100)
        for member in everyone:
            member.join(2 * WAIT_S)
        if any(member.is_alive() for member in everyone):
            raise RuntimeError("a thread still waits for its transfer")
    served = [sum(member.bytes for member in group) for group in members]
    errors = [error for member in everyone for error in member.errors]
    return {
        "bytes": sum(served),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "samples": samples,
        "unfairness": max(served) / max(1, min(served)),
    }


def main() -> None:
    """Be peers, or run the crowd and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", type=int, default=0, help="how many peers this process is")
    parser.add_argument("--peers", type=int, default=64)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    wire.die_with_parent()
    if options.serve:
        return serve(options.serve, ROOM * options.threads)
    answers = wire.take_stdout()
    wire.say(answers, run(options.peers, options.threads, options.seconds))


if __name__ == "__main__":
    main()
