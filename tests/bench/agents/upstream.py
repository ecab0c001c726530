"""The upstream Mooncake Transfer Engine over tcp as a contestant: two processes on loopback."""

from __future__ import annotations

import argparse
import os
import sys

import wire


def engine():
    """Start an engine that peers reach by handshake."""
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if status := made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"initialize() returned {status}")
    return made


def serve(nbytes: int) -> None:
    """Be the target."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    target = engine()
    _memory, address = wire.touched_memory(nbytes)
    if status := target.register_memory(address, nbytes):
        raise RuntimeError(f"register_memory() returned {status}")
    session = f"127.0.0.1:{target.get_rpc_port()}"
    wire.say(answers, {"session": session, "address": address, "pid": os.getpid()})
    sys.stdin.buffer.read()
    os._exit(0)


class Initiator:
    """Moves blocks with the synchronous calls."""

    def __init__(self, nbytes: int) -> None:
        argv = [sys.executable, __file__, "--serve", "--nbytes", str(nbytes)]
        self.child, told = wire.start_target(argv)
        self.session, self.remote = told["session"], told["address"]
        self.pids = [os.getpid(), told["pid"]]
        self.engine = engine()
        self.memory, self.local = wire.touched_memory(nbytes)
        if status := self.engine.register_memory(self.local, nbytes):
            raise RuntimeError(f"register_memory() returned {status}")

    def check(self) -> dict[str, object]:
        """Prove that bytes arrive: a pattern there and back."""
        size = 1 << 20
        pattern = os.urandom(size)
        self.memory[:size] = pattern
        self._call("transfer_sync_write", self.local, self.remote, size)
        self._call("transfer_sync_read", self.local + 2 * size, self.remote, size)
        assert self.memory[2 * size : 3 * size] == pattern, "bytes were changed on the way"
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time transfers of ``count`` blocks."""
        if count == 1:
            name, arguments = f"transfer_sync_{op}", (self.local, self.remote, size)
        else:
            offsets = wire.block_offsets(count, size)
            name = f"batch_transfer_sync_{op}"
            arguments = (
                [self.local + at for at in offsets],
                [self.remote + at for at in offsets],
                [size] * count,
            )
        return wire.time_calls(lambda: self._call(name, *arguments), seconds, self.pids)

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self.engine, name)(self.session, *arguments):
            raise RuntimeError(f"{name}() returned {status}")


def main() -> None:
    """Serve as target, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    options = parser.parse_args()
    if options.serve:
        return serve(options.nbytes)
    wire.die_with_parent()
    answers = wire.take_stdout()
    initiator = Initiator(options.nbytes)
    wire.say(answers, initiator.check())
    wire.answer_requests(answers, {"measure": initiator.measure})
    os._exit(0)


if __name__ == "__main__":
    main()
