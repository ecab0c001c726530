"""What a benchmark will measure, worked out before anything is started."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from mooncake_transfer._errors import ConfigError

__all__ = ["Plan", "Point", "parse_size", "parse_sizes", "shown_size"]

READ, WRITE = "read", "write"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Read a size such as ``64``, ``4K``, ``1 MiB`` (powers of 1024). Raises ConfigError."""
    found = SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ConfigError(f"{text!r} is no size; write a positive number with K, M or G, for example 64K")
    return int(found[1]) * UNITS[found[2].upper()]


def shown_size(nbytes: int) -> str:
    """Write a size as people do: ``64 B``, ``4 KiB``."""
    fitting = [(unit, name) for name, unit in UNITS.items() if nbytes % unit == 0]
    unit, name = max(fitting)
    return f"{nbytes // unit} {name}{'iB' if name else 'B'}"


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read sizes separated by commas. Raises ConfigError."""
    return tuple(parse_size(part) for part in text.split(","))


def parse_counts(text: str, what: str) -> tuple[int, ...]:
    """Read counts such as ``1,64`` or ``1K``; ``what`` names one. Raises ConfigError."""
    found = [SIZE.fullmatch(part.strip()) for part in text.split(",")]
    for part, match in zip(text.split(","), found, strict=True):
        if match is None or int(match[1]) == 0 or part.strip().upper().endswith("B"):
            raise ConfigError(f"{part.strip()!r} is not {what}; write a positive number, for example 8")
    return parse_sizes(text)


class Point(msgspec.Struct, frozen=True):
    """What ``threads`` threads do at the same time: transfers of ``batch`` blocks of ``size`` bytes."""

    driver: str
    op: str
    size: int
    batch: int
    threads: int

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer of one thread."""
        return self.size * self.batch

    @property
    def slot_bytes(self) -> int:
        """Room of one thread: after each block follows a gap, so that no two can be moved as one."""
        return self.size if self.batch == 1 else 2 * self.nbytes

    @property
    def region_bytes(self) -> int:
        """Memory needed on either side."""
        return self.slot_bytes * self.threads

    def blocks(self, thread: int) -> npt.NDArray[np.uint64]:
        """The block list of one thread; the same offsets on both sides."""
        offsets = np.arange(self.batch, dtype=np.uint64) * np.uint64(2 * self.size)
        offsets += np.uint64(thread * self.slot_bytes)
        return np.stack([offsets, offsets, np.full(self.batch, self.size, dtype=np.uint64)], axis=1)


class Plan(msgspec.Struct, frozen=True):
    """All combinations to measure. Raises ConfigError for values that make no sense.

    Attributes:
        drivers: names of drivers, each measured on its own.
        ops: ``write``, ``read`` or both.
        sizes: bytes of a block.
        batches: blocks of a transfer.
        threads: threads that transfer at the same time.
        seconds: how long each combination is measured.
        max_bytes: combinations that need more memory than this on one side are left out.
    """

    drivers: tuple[str, ...]
    ops: tuple[str, ...] = (WRITE, READ)
    sizes: tuple[int, ...] = (64, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
    batches: tuple[int, ...] = (1, 64)
    threads: tuple[int, ...] = (1,)
    seconds: float = 0.5
    max_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if unknown := set(self.ops) - {READ, WRITE}:
            raise ConfigError(f"unknown operation {sorted(unknown)}; there are {READ} and {WRITE}")
        if min(self.threads) < 1 or max(self.threads) > 1024:
            raise ConfigError(f"threads {self.threads} must lie within 1..1024")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"seconds is {self.seconds}; it must be within 0..3600")
        if not self.points():
            raise ConfigError(f"nothing to measure: every combination needs more than {self.max_bytes} bytes")

    def points(self) -> list[Point]:
        """Every combination that fits into ``max_bytes``, in the order they are measured."""
        return [point for point in self._combinations() if point.region_bytes <= self.max_bytes]

    def skipped(self) -> int:
        """How many combinations need too much memory."""
        return sum(point.region_bytes > self.max_bytes for point in self._combinations())

    @property
    def region_bytes(self) -> int:
        """Memory that the largest combination needs on either side."""
        return max(point.region_bytes for point in self.points())

    def _combinations(self) -> Iterator[Point]:
        axes = (self.drivers, self.ops, self.batches, self.threads, self.sizes)
        for driver, op, batch, threads, size in itertools.product(*axes):
            yield Point(driver, op, size, batch, threads)
