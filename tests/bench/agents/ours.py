"""This project's engine as a contestant: two processes on one host, one driver."""

from __future__ import annotations

import argparse
import os
import struct
import sys
import threading
import time

import numpy as np
import wire

from mooncake_transfer import Caller, TransferConfig, TransferEngine

WATCH, SEEN = "bench.watch", "bench.seen"
TIME = struct.Struct("q")
LOOK_S = 20e-6  # the first byte is seen at most so much late, and what a timer adds, about 60 us
WATCH_LIMIT_S = 20.0


def engine_with(driver: str, pool: str) -> TransferEngine:
    """An engine with one driver; that of cxl allocates in a pool, unless it is told not to."""
    if not pool:
        return TransferEngine(TransferConfig(drivers=(driver,)))
    return TransferEngine(
        TransferConfig(drivers=(driver,), driver_options={driver: {"path": pool}}, allocate_from=driver)
    )


class Target:
    """The other side: memory to read and write, and a watch on when the first byte of a list arrives."""

    def __init__(self, nbytes: int, driver: str, pool: str) -> None:
        self.engine = engine_with(driver, pool)
        self.region = self.engine.allocate(nbytes, prefault=not pool)  # pools have their pages already
        self.bytes = np.frombuffer(self.region.view(), dtype=np.uint8)
        self.watcher: threading.Thread | None = None
        self.first_ns = 0
        self.engine.serve(WATCH, self.watch)
        self.engine.serve(SEEN, self.seen)

    def watch(self, payload: bytes, _: Caller) -> bytes:
        """Look out, from now on, for a byte in a thousand evenly spaced blocks of the announced list."""
        stride, count = struct.unpack("qq", payload)
        heads = self.bytes[: stride * count : stride * max(1, count // 1000)]
        heads[:] = 0
        self.watcher = threading.Thread(target=self._look, args=(heads,))
        self.watcher.start()
        return b""

    def _look(self, heads: np.ndarray) -> None:
        self.first_ns = 0
        deadline_s = time.monotonic() + WATCH_LIMIT_S
        while not heads.any():
            if time.monotonic() > deadline_s:
                return
            # A look that never naps takes the core that this engine's own thread needs to receive.
            time.sleep(LOOK_S)
        self.first_ns = time.monotonic_ns()

    def seen(self, _payload: bytes, _: Caller) -> bytes:
        """Say when the first byte was there, in nanoseconds of the clock that all processes share."""
        assert self.watcher is not None
        self.watcher.join(WATCH_LIMIT_S)
        return TIME.pack(self.first_ns)


class Initiator:
    """Prepares transfers once, then posts and waits."""

    def __init__(self, nbytes: int, driver: str, pool: str) -> None:
        argv = [sys.executable, __file__, "--serve", "--nbytes", str(nbytes), "--driver", driver]
        self.child, told = wire.start_target([*argv, "--pool", pool])
        self.pids = [os.getpid(), told["pid"]]
        self.engine = engine_with(driver, pool)
        self.local = self.engine.allocate(nbytes, prefault=True, driver="")
        np.frombuffer(self.local.view(), dtype=np.uint8)[:] = 1
        self.remote = self.engine.import_region(bytes.fromhex(told["descriptor"]))

    def check(self) -> dict[str, object]:
        """Prove that bytes arrive: a pattern there and back."""
        size = 1 << 20
        pattern, view = os.urandom(size), self.local.view()
        view[:size] = pattern
        self.engine.write(self.local, self.remote, [[0, 0, size]]).wait()
        self.engine.read(self.local, self.remote, [[2 * size, 0, size]]).wait()
        assert bytes(view[2 * size : 3 * size]) == pattern, "bytes were changed on the way"
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time transfers of ``count`` blocks, prepared once."""
        prepare = self.engine.prepare_write if op == "write" else self.engine.prepare_read
        transfer = prepare(self.local, self.remote, self._blocks(count, size))

        def call() -> None:
            transfer.post()
            transfer.wait()

        return wire.time_calls(call, seconds, self.pids)

    def first_byte(self, size: int, count: int) -> dict[str, object]:
        """Time from a write of ``count`` blocks, not prepared, until the target has its first byte."""
        blocks = self._blocks(count, size)
        self.remote.peer.call(WATCH, struct.pack("qq", 2 * size, count))
        started = time.monotonic_ns()
        transfer = self.engine.write(self.local, self.remote, blocks)
        posted = time.monotonic_ns()
        transfer.wait()
        done = time.monotonic_ns()
        (first,) = TIME.unpack(self.remote.peer.call(SEEN))
        if first == 0:
            raise RuntimeError(f"the target saw no byte within {WATCH_LIMIT_S:g} s")
        moments = {"first_us": first, "posted_us": posted, "done_us": done}
        return {name: (when - started) / 1e3 for name, when in moments.items()}

    @staticmethod
    def _blocks(count: int, size: int) -> np.ndarray:
        offsets = np.array(wire.block_offsets(count, size), dtype=np.uint64)
        return np.stack([offsets, offsets, np.full(count, size, dtype=np.uint64)], axis=1)


def serve(nbytes: int, driver: str, pool: str) -> None:
    """Be the target until standard input ends."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    target = Target(nbytes, driver, pool)
    with target.engine:
        wire.say(answers, {"descriptor": target.region.descriptor().hex(), "pid": os.getpid()})
        sys.stdin.buffer.read()


def main() -> None:
    """Serve as target, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--driver", default="tcp")
    parser.add_argument("--pool", default="", help="path of a pool, for the driver cxl")
    options = parser.parse_args()
    if options.serve:
        return serve(options.nbytes, options.driver, options.pool)
    wire.die_with_parent()
    answers = wire.take_stdout()
    initiator = Initiator(options.nbytes, options.driver, options.pool)
    with initiator.engine:
        wire.say(answers, initiator.check())
        handlers = {"measure": initiator.measure, "first_byte": initiator.first_byte}
        wire.answer_requests(answers, handlers)


if __name__ == "__main__":
    main()
