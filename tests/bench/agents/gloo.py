"""torch.distributed with gloo as a contestant: send and a 4-byte answer, between two ranks on loopback."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time

import wire

STOP = 0


def join(rank: int, port: int):
    """Enter the group of two; returns (torch, torch.distributed)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    return torch, dist


def serve(port: int) -> None:
    """Be rank 1: receive as many blocks of a size as announced, answering each."""
    wire.die_with_parent()
    answers = wire.take_stdout()
    wire.say(answers, {"pid": os.getpid()})
    torch, dist = join(1, port)
    order = torch.zeros(2, dtype=torch.int64)
    answer = torch.zeros(1)
    while True:
        dist.recv(order, 0)
        size, calls = order.tolist()
        if size == STOP:
            os._exit(0)
        block = torch.zeros(size, dtype=torch.uint8)
        for _ in range(calls):
            dist.recv(block, 0)
            dist.send(answer, 0)


class Initiator:
    """Rank 0, which sends."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.child, told = wire.start_target([sys.executable, __file__, "--serve", "--port", str(port)])
        self.pids = [os.getpid(), told["pid"]]
        self.torch, self.dist = join(0, port)

    def check(self) -> dict[str, object]:
        """Send one block."""
        self._send(1024, 1)
        return {"pids": self.pids}

    def measure(self, op: str, size: int, count: int, seconds: float) -> dict[str, object]:
        """Time blocks of one size; ``op`` is always a write and ``count`` 1."""
        assert (op, count) == ("write", 1)
        self._send(size, 2)
        started_s = time.perf_counter()
        self._send(size, 2)
        each_s = (time.perf_counter() - started_s) / 2
        calls = int(min(20_000, max(wire.LEAST_CALLS, seconds / each_s)))
        block, answer = self._announce(size, calls)
        taken = []
        cpu_before_s = wire.cpu_seconds(self.pids)
        for _ in range(calls):
            started = time.perf_counter_ns()
            self.dist.send(block, 1)
            self.dist.recv(answer, 1)
            taken.append(time.perf_counter_ns() - started)
        return wire.summary(taken, wire.cpu_seconds(self.pids) - cpu_before_s)

    def _announce(self, size: int, calls: int):
        self.dist.send(self.torch.tensor([size, calls]), 1)
        return self.torch.ones(size, dtype=self.torch.uint8), self.torch.zeros(1)

    def _send(self, size: int, calls: int) -> None:
        block, answer = self._announce(size, calls)
        for _ in range(calls):
            self.dist.send(block, 1)
            self.dist.recv(answer, 1)


def main() -> None:
    """Serve as rank 1, or answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    if options.serve:
        return serve(options.port)
    wire.die_with_parent()
    answers = wire.take_stdout()
    initiator = Initiator()
    wire.say(answers, initiator.check())
    wire.answer_requests(answers, {"measure": initiator.measure})
    os._exit(0)


if __name__ == "__main__":
    main()
