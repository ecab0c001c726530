"""Ranks of torch.distributed as a contestant: collectives of one backend between processes of this host.

Rank 0 answers the runner; it forks the others, which wait for orders on a pipe, so what is measured is
nothing but the collective.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import tempfile
import time

import torch
import torch.distributed as dist
import wire

CLONE_NEWNET = 0x40000000
LEAST, MOST = 5, 20_000
WARM = 200  # operations before a kill


def go_to(namespaces: list[str], rank: int, world: int) -> None:
    """Enter the network namespace of a rank: the first ranks are in the first one. None: stay."""
    if not namespaces:
        return
    with open(f"/run/netns/{namespaces[rank * len(namespaces) // world]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for _, name in socket.if_nameindex() if name != "lo")


def start(backend: str, rank: int, world: int, folder: str, namespaces: list[str]) -> None:
    """Enter the group."""
    torch.set_num_threads(1)
    go_to(namespaces, rank, world)
    if backend == "mooncake":
        from mooncake_ep import pg  # noqa: F401 - registers the backend
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)


def prepared(op: str, size: int):
    """Return the call to be timed; ``size`` is of the larger side of a rank, in bytes."""
    world = dist.get_world_size()
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // world)
    other = torch.ones_like(whole)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "copy": lambda: other.copy_(whole),
        "call": lambda: dist.group.WORLD.allreduce([whole], OPTIONS),
    }[op]


OPTIONS = dist.AllreduceOptions()
OPTIONS.asyncOp = False


class Ranks:
    """Rank 0, with the others as children."""

    def __init__(self, backend: str, world: int, namespaces: list[str]) -> None:
        self.folder = tempfile.mkdtemp()
        self.orders: list[int] = []
        self.pids = [os.getpid()]
        for rank in range(1, world):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(writer)
                follow(backend, rank, world, self.folder, namespaces, reader)
            os.close(reader)
            self.orders.append(writer)
            self.pids.append(pid)
        start(backend, 0, world, self.folder, namespaces)
        dist.barrier()

    def measure(self, op: str, size: int, seconds: float) -> dict[str, object]:
        """Time one collective for about ``seconds``, on rank 0."""
        call = prepared(op, size)
        each_s = sum(self._time(op, size, call, 3)[1:]) / 2e9
        calls = int(min(MOST, max(LEAST, seconds / max(each_s, 1e-7))))
        before_s = wire.cpu_seconds(self.pids)
        taken = self._time(op, size, call, calls)
        return wire.summary(taken, wire.cpu_seconds(self.pids) - before_s)

    def _time(self, op: str, size: int, call, calls: int) -> list[int]:
        for order in self.orders:
            os.write(order, json.dumps([op, size, calls]).encode() + b"\n")
        dist.barrier()
        taken = []
        for _ in range(calls):
            started = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - started)
        return taken


def follow(backend: str, rank: int, world: int, folder: str, namespaces: list[str], orders: int) -> None:
    """Do as rank 0 says, until it ends."""
    wire.die_with_parent()
    start(backend, rank, world, folder, namespaces)
    dist.barrier()
    calls = {}
    for line in os.fdopen(orders):
        op, size, count = json.loads(line)
        if (op, size) not in calls:
            calls = {(op, size): prepared(op, size)}
        call = calls[op, size]
        dist.barrier()
        for _ in range(count):
            call()
    os._exit(0)


def resumed_after_kill(world: int, size: int, namespaces: list[str]) -> float:
    """Milliseconds from a SIGKILL of the last rank to the end of an all_reduce without it on rank 0."""
    folder = tempfile.mkdtemp()
    reader, writer = os.pipe()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            wire.die_with_parent()
            stream(rank, world, size, folder, namespaces, writer)
        pids.append(pid)
    os.read(reader, 1)
    killed_ns = time.monotonic_ns()
    os.kill(pids[-1], signal.SIGKILL)
    resumed_ns = int(os.read(reader, 64))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reader)
    os.close(writer)
    return (resumed_ns - killed_ns) / 1e6


def stream(rank: int, world: int, size: int, folder: str, namespaces: list[str], told: int) -> None:
    """Reduce for ever; rank 0 says when it began, and when it went on without the last rank."""
    start("mooncake", rank, world, folder, namespaces)
    tensor = torch.ones(size // 4)
    dist.barrier()
    for _ in range(WARM):
        dist.all_reduce(tensor)
    if rank == 0:
        os.write(told, b"b")
    while len(dist.group.WORLD.members) == world:
        dist.all_reduce(tensor)
        tensor.fill_(1.0)
    if rank == 0:
        os.write(told, str(time.monotonic_ns()).encode())
    while True:
        dist.all_reduce(tensor)


def kills(world: int, size: int, count: int, namespaces: list[str]) -> dict[str, object]:
    """Kill ``count`` times."""
    return {"ms": sorted(resumed_after_kill(world, size, namespaces) for _ in range(count))}


def main() -> None:
    """Answer the runner."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--namespaces", nargs="*", default=[], help="network namespaces that stand for hosts")
    options = parser.parse_args()
    wire.die_with_parent()
    answers = wire.take_stdout()
    if options.backend == "mooncake":
        import mooncake_ep.pg  # noqa: F401 - before forks
    if options.world == 0:  # only kills, which start their own groups
        wire.say(answers, {"pids": [os.getpid()]})
        wire.answer_requests(answers, {"kills": kills})
        os._exit(0)
    ranks = Ranks(options.backend, options.world, options.namespaces)
    wire.say(answers, {"pids": ranks.pids})
    wire.answer_requests(answers, {"measure": ranks.measure})
    os._exit(0)


if __name__ == "__main__":
    main()
