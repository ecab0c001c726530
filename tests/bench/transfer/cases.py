"""What the transfer benchmark measures, against whom, and what is aimed at: the speed table of the engine."""

from __future__ import annotations

import dataclasses

from rows import RATIO, VALUE, Target
from spinners import AWAKE, BUSY, IDLE

KIB, MIB = 1 << 10, 1 << 20

# Contestants by their short names, as `--only` and the cases use them.
SHM, TCP, CXL = "ours-shm", "ours-tcp", "ours-cxl"
NIXL, NIXL_TCP, NIXL_TCP_SEEN = "nixl", "nixl-tcp", "nixl-tcp-seen"
UPSTREAM_STORE, REDIS = "upstream-store", "redis"
UPSTREAM, GLOO, COPY, SOCKET = "upstream", "gloo", "plain_copy", "plain_socket"

LATENCY, RATE, BLOCK_RATE, CPU = "us p50", "GB/s", "M blocks/s", "CPU s/GB"
OBJECT_RATE, KEY_RATE = "k objects/s", "M keys/s"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One thing that every contestant can be asked to do."""

    op: str
    size: int
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that one call moves."""
        return self.size * self.count

    def __str__(self) -> str:
        many = f"{self.count} x " if self.count > 1 else ""
        return f"{many}{shown_size(self.size)} {self.op}"


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of the table: one operation of ours in one unit, against each of some peers.

    ``targets`` hold in the conditions ``target_in``. ``in_quick``: whether --quick measures it, too.
    """

    ours: str
    operation: Operation
    unit: str
    peers: tuple[str, ...] = ()
    targets: tuple[Target | None, ...] = ()
    note: str = ""
    conditions: tuple[str, ...] = (IDLE, BUSY)
    target_in: tuple[str, ...] = (IDLE, BUSY)
    in_quick: bool = True

    @property
    def what(self) -> str:
        """The row's name, without the condition."""
        driver = self.ours.removeprefix("ours-")
        return f"{driver} {self.operation}{', ' + self.note if self.note else ''}"


def shown_size(size: int) -> str:
    """A size as people write it."""
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def at_most(times: float) -> Target:
    """A bound on the ratio from above."""
    return Target(RATIO, at_most=times)


def at_least(times: float) -> Target:
    """A bound on the ratio from below."""
    return Target(RATIO, at_least=times)


def shm_cases() -> list[Case]:
    """Shared memory against NIXL's own choice, and against a plain copy."""
    prepared = "prepared, post+wait"
    found = [
        Case(SHM, Operation("write", size), LATENCY, (NIXL,), (at_most(0.75),), prepared)
        for size in (64, 4 * KIB)
    ]
    for size, times in ((64 * KIB, 1.0), (MIB, 1.2), (16 * MIB, 1.5)):
        copy_target = at_least(0.95) if size >= 16 * MIB else None
        operation = Operation("write", size)
        found.append(Case(SHM, operation, RATE, (NIXL, COPY), (at_least(times), copy_target)))
    found.append(Case(SHM, Operation("write", 64 * KIB, 128), RATE, (NIXL, COPY), (at_least(1.5), None)))
    largest = Operation("write", 64 * MIB)
    found.append(Case(SHM, largest, RATE, (NIXL, COPY), (None, at_least(0.95)), in_quick=False))
    found += [
        Case(SHM, Operation("read", size), RATE, (NIXL,), (None,), in_quick=False)
        for size in (64 * KIB, MIB, 16 * MIB)
    ]
    return found


def cxl_cases() -> list[Case]:
    """Between main memory and a pool in a file of main memory, against a plain copy and against shm."""
    small = [
        Case(CXL, Operation(op, size), LATENCY, (SHM,), (None,), "prepared, post+wait", conditions=(IDLE,))
        for op in ("write", "read")
        for size in (64, 4 * KIB)
    ]
    large = [
        Case(CXL, Operation(op, size, count), RATE, (COPY, SHM), (at_least(0.95), None), conditions=(IDLE,))
        for op in ("write", "read")
        for size, count in ((MIB, 1), (16 * MIB, 1), (64 * KIB, 128))
    ]
    return small + large


def tcp_cases() -> list[Case]:
    """Loopback against NIXL over tcp, upstream, gloo's send with an answer, and bare sockets."""
    found = []
    for size in (64 * KIB, MIB, 16 * MIB):
        upstream = at_least(3.0) if size >= MIB else None
        read, write = Operation("read", size), Operation("write", size)
        found.append(Case(TCP, read, RATE, (NIXL_TCP, UPSTREAM, SOCKET), (at_least(1.3), upstream, None)))
        targets = (at_least(1.2), upstream, None, None, None)
        peers = (NIXL_TCP_SEEN, UPSTREAM, NIXL_TCP, GLOO, SOCKET)
        found.append(Case(TCP, write, RATE, peers, targets, "until visible at the target"))
    for op in ("write", "read"):
        scattered = Operation(op, 4 * KIB, 1000)
        found.append(Case(TCP, scattered, BLOCK_RATE, (UPSTREAM,), (at_least(10.0),), "scattered"))
    small = Operation("write", 64)
    found.append(Case(TCP, small, LATENCY, (NIXL_TCP,), (None,), conditions=(IDLE,)))
    found.append(
        Case(TCP, small, LATENCY, (NIXL_TCP,), (at_most(1.0),), conditions=(AWAKE,), target_in=(AWAKE,))
    )
    busy = Target(VALUE, at_most=60.0)
    found.append(Case(TCP, small, LATENCY, (NIXL_TCP,), (busy,), conditions=(BUSY,), target_in=(BUSY,)))
    cheap = Target(VALUE, at_most=0.5)
    found += [
        Case(TCP, Operation(op, 16 * MIB), CPU, (NIXL_TCP, UPSTREAM), (cheap, None), "both sides together")
        for op in ("write", "read")
    ]
    return found


def value(unit: str, operation: Operation, found: dict[str, float]) -> float:
    """Turn what a contestant measured per call into the unit of a row.

    Rates are those of the median call: a window in which the machine did something else does not count.
    """
    if unit == LATENCY:
        return found["p50_us"]
    if unit == RATE:
        return operation.nbytes / found["p50_us"] / 1e3
    if unit in (BLOCK_RATE, KEY_RATE):
        return operation.count / found["p50_us"]
    if unit == OBJECT_RATE:
        return operation.count / found["p50_us"] * 1e3
    return found["cpu_us"] / operation.nbytes * 1e3
