"""Memory that a rank lends to the other ranks of its host."""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple

__all__ = ["HALF_BYTES", "Lent", "Neighbours", "Outbox"]

HALF_BYTES = 8 << 30  # of an outbox: the first half is for inputs, the second for results


class Lent(NamedTuple):
    """Where an outbox is found: by whoever is on `host`, as a descriptor of a process."""

    host: str
    pid: int
    fd: int


class Outbox:
    """What this rank lends. Only this rank writes it; its pages take memory once they are written."""

    def __init__(self, host: str) -> None:
        self._fd = os.memfd_create("mooncake-pg-outbox", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, 2 * HALF_BYTES)
        self._memory = memoryview(mmap.mmap(self._fd, 2 * HALF_BYTES))
        self.lent = Lent(host, os.getpid(), self._fd)

    def inputs(self, nbytes: int) -> memoryview:
        """Return the beginning of the half for inputs."""
        return self._memory[:nbytes]

    def results(self, nbytes: int) -> memoryview:
        """Return the beginning of the half for results."""
        return self._memory[HALF_BYTES : HALF_BYTES + nbytes]

    def close(self) -> None:
        """Stop lending; who has it open goes on."""
        os.close(self._fd)


class Neighbours:
    """What the other ranks of this host lend."""

    def __init__(self) -> None:
        self._open: dict[Lent, memoryview] = {}

    def inputs(self, lent: Lent, nbytes: int) -> memoryview:
        """Return a rank's inputs. Raises OSError when it is gone before this rank has opened its outbox."""
        return self._of(lent)[:nbytes]

    def results(self, lent: Lent, nbytes: int) -> memoryview:
        """Return a rank's results."""
        return self._of(lent)[HALF_BYTES : HALF_BYTES + nbytes]

    def _of(self, lent: Lent) -> memoryview:
        memory = self._open.get(lent)
        if memory is None:
            fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDWR)
            try:
                memory = memoryview(mmap.mmap(fd, 2 * HALF_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE))
            finally:
                os.close(fd)
            self._open[lent] = memory
        return memory
